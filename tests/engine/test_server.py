"""HTTP, phases and the start-up probe of a live engine."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from tests.engine.conftest import LiveEngine
from verl_opd.engines.http import HttpServer
from verl_opd.engines.settings import engine_arguments
from verl_opd.errors import RolloutError

pytestmark = pytest.mark.engine


def request(url: str, key: str | None = None, body: dict | None = None) -> tuple[int, str]:
    headers = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, headers=headers), timeout=60
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_openai_server_answers_on_loopback_and_requires_the_key(live: LiveEngine):
    url, key = live.call(live.engine.http_address())
    assert url.startswith("http://127.0.0.1:")
    body = {
        "model": live.settings.model_path,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    }
    assert request(f"{url}/health")[0] == 200
    assert request(f"{url}/v1/chat/completions", None, body)[0] == 401
    assert request(f"{url}/v1/chat/completions", "wrong", body)[0] == 401
    status, text = request(f"{url}/v1/chat/completions", key, body)
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] >= 1
    assert "vllm:spec_decode_num_drafts" in request(f"{url}/metrics", key)[1]


def test_an_engine_asleep_rejects_requests_and_wakes_in_order(live: LiveEngine, prompts):
    live.call(live.engine.sleep(0))
    live.call(live.engine.sleep(0))
    with pytest.raises(RolloutError, match="asleep"):
        live.generate("asleep", prompts[0])
    live.call(live.engine.wake(["weights"]))
    with pytest.raises(RolloutError, match="asleep"):
        live.generate("half-awake", prompts[0])
    live.call(live.engine.wake(["kv_cache"]))
    live.call(live.engine.reset_prefix_cache())
    assert live.generate("awake", prompts[0]).token_ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"target_layer_ids": (1, 3, 5)},
            r"aux_layer_ids is \[1, 3, 6\] in the engine, configured \[2, 4, 6\]",
        ),
        ({"mask_token_id": 9}, "mask_token_id is 3 in the engine, configured 9"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens is 3 in the engine, configured 5"),
        ({"method": "eagle3"}, "method is 'dflash' in the engine, configured 'eagle3'"),
    ],
)
def test_the_probe_compares_the_live_engine_with_the_configuration(
    live: LiveEngine, change: dict, named: str
):
    kept = live.engine._speculation
    live.engine._speculation = replace(kept, **change)
    try:
        with pytest.raises(RolloutError, match=f"start-up probe: {named}"):
            live.call(live.engine._probe())
    finally:
        live.engine._speculation = kept


def test_the_probe_notices_a_recorder_that_sees_nothing(live: LiveEngine):
    live.call(live.engine.set_recording(False))
    try:
        with pytest.raises(RolloutError, match="was not recorded"):
            live.call(live.engine._probe())
    finally:
        live.call(live.engine.set_recording(True))


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RolloutError, match=f"port {port} on 127.0.0.1 is taken"):
            HttpServer(port)


def test_engine_kwargs_come_last_and_json_is_parsed(live: LiveEngine):
    settings = replace(
        live.settings, engine_kwargs={"seed": 9, "compilation_config": '{"mode": 0}'}
    )
    arguments = engine_arguments(settings)
    assert arguments["seed"] == 9
    assert arguments["compilation_config"] == {"mode": 0}
