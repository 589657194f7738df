"""`verl-opd doctor`: every kind of problem is listed with a remedy, and one does not hide the
others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tiny import MASK_TOKEN_ID
from verl_opd.ascend import versions as stack
from verl_opd.cli import main
from verl_opd.commands.doctor import diagnose, print_diagnosis
from verl_opd.config.schema import Config


@pytest.fixture
def cfg(tiny_llama_dir: Path, tmp_path: Path) -> Config:
    cfg = Config()
    (tmp_path / "train.jsonl").write_text('{"prompt": "say one"}\n{"prompt": "say two"}\n')
    cfg.target.path, cfg.data.train_files = str(tiny_llama_dir), [str(tmp_path / "train.jsonl")]
    cfg.draft.mask_token_id, cfg.data.train_batch_size, cfg.trainer.device = MASK_TOKEN_ID, 2, "cpu"
    cfg.trainer.run_dir, cfg.draft.target_layer_ids = str(tmp_path / "run"), [0, 2, 5]
    return cfg


def missing(cfg: Config) -> dict[str, str]:
    return {
        finding.what: f"{finding.seen} {finding.remedy}"
        for finding in diagnose(cfg)
        if finding.level == "error"
    }


def test_a_machine_and_configuration_that_fit(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = sorted(tmp_path.iterdir())
    assert missing(cfg) == {}
    assert print_diagnosis(cfg)
    assert "ready to run" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_every_problem_is_listed_and_none_hides_another(
    cfg: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5e8})())
    cfg.trainer.logger = ["wandb"]
    cfg.target.path = "/no/such/target"
    found = missing(cfg)
    assert set(found) == {"wandb", "run directory", "configuration"}
    assert "pip install 'verl-opd[wandb]'" in found["wandb"]
    assert "0.5 GB free" in found["run directory"]
    assert "target.path=/no/such/target does not exist" in found["configuration"]
    assert not print_diagnosis(cfg)
    assert "cannot run: wandb, run directory, configuration" in capsys.readouterr().out


def test_more_workers_than_cores_is_only_a_note(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl_opd.commands.doctor.available_cores", lambda: [0])
    cfg.trainer.n_student_workers = 2
    (cores,) = [finding for finding in diagnose(cfg) if finding.what == "cores"]
    assert cores.level == "note"
    assert "some will share cores" in cores.remedy


def test_the_exit_code_says_whether_a_run_can_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for ready, code in ((True, 0), (False, 2)):
        monkeypatch.setattr(
            "verl_opd.commands.doctor.print_diagnosis", lambda cfg, ready=ready: ready
        )
        assert main(["doctor", "quickstart", "target.path=/no/such/target"]) == code


def test_the_ascend_stack_is_compared_on_npus_only(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    packages = {
        "vllm-ascend": "0.23.0",
        "torch": "2.10.0",
        "torch-npu": "2.10.0.post2",
        "triton-ascend": "3.2.2",
        "transformers": "5.5.4",
    }
    machine = stack.Machine(
        packages={**packages, "triton": "3.5.0"}, python="3.11.7", vllm="0.23.0+empty", cann="9.1.0"
    )
    monkeypatch.setattr(stack, "detect", lambda environ: machine)
    assert not [finding for finding in diagnose(cfg) if finding.what == "NPU stack"]
    cfg.trainer.device = "npu"
    note, error = [finding for finding in diagnose(cfg) if finding.what == "NPU stack"]
    assert (note.level, note.seen) == (
        "note",
        "torch-npu: 2.10.0.post2; the table has 2.10.0.post4",
    )
    assert (error.level, error.seen) == (
        "error",
        "triton: upstream 3.5.0 beside triton-ascend, which has the same module",
    )
    assert "./install_npu.sh" in error.remedy
    whole = stack.Machine(
        packages={**packages, "torch-npu": "2.10.0.post4"},
        python="3.11.7",
        vllm="0.23.0+empty",
        cann="9.1.0",
    )
    monkeypatch.setattr(stack, "detect", lambda environ: whole)
    (fits,) = [finding for finding in diagnose(cfg) if finding.what == "NPU stack"]
    assert fits.level == "ok"
    assert "vllm 0.23.0 (vllm 0.23.0+empty is installed)" in fits.seen


def test_a_package_missing_on_npus_never_comes_from_an_extra(
    cfg: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install 'verl-opd[cuda' or" in missing(cfg)["vllm"]
    cfg.trainer.device = "npu"
    assert missing(cfg)["vllm"].endswith("./install_npu.sh")
