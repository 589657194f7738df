import pytest

from verl_opd.drafts.files import local_directory
from verl_opd.errors import ConfigError


def test_a_directory_is_itself(tmp_path):
    assert local_directory(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("path", ["no/such/place/at/all", "owner/repository"])
def test_what_is_neither_directory_nor_reachable_repository_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=f"draft.path={path} is neither a directory nor a hub repository"
    ):
        local_directory(path)
