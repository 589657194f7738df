"""What devices declare, and the resources that Ray reserves for them."""

from __future__ import annotations

import pytest

from verl_opd.devices import DEVICES


@pytest.mark.parametrize(
    ("name", "bundle", "options"),
    [
        ("cpu", {}, {}),
        ("cuda", {"GPU": 0.5}, {"num_gpus": 0.5}),
        ("npu", {"NPU": 0.5}, {"resources": {"NPU": 0.5}}),
    ],
)
def test_what_a_share_of_a_device_is_for_ray(
    name: str, bundle: dict[str, float], options: dict[str, object]
) -> None:
    assert DEVICES[name].bundle(0.5) == bundle
    assert DEVICES[name].actor_options(0.5) == options


def test_only_the_host_keeps_engines_awake_and_lacks_the_v2_runner() -> None:
    rows = DEVICES.values()
    assert {row.name for row in rows if row.on_host} == {"cpu"}
    assert {row.name for row in rows if not row.sleeps} == {"cpu"}
    assert {row.name for row in rows if not row.v2_runner} == {"cpu"}
    assert {row.name: row.stack for row in rows if row.stack} == {"npu": "ascend"}
    assert DEVICES["cpu"].noset_env is None
