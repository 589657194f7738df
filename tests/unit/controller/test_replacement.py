"""Servers that a fleet replaces, and what it switches and measures; actors are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import ray

from tests.fakes import fake_fleet
from verl_opd.data.prompts import Prompt
from verl_opd.errors import WeightSyncError
from verl_opd.snapshot import DraftSnapshot

SNAPSHOT = DraftSnapshot(3, "file", {}, "c")


def test_a_lost_engine_is_replaced_by_one_in_the_state_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "verl_opd")
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    fleet.snapshot = lambda: SNAPSHOT
    fleet.set_drafting(False)
    fleet.sleep()
    old = fleet.servers[1]
    actors.calls.clear()
    actors.reasons["engine 1"] = "died"
    assert fleet.replace_failed()
    new = fleet.servers[1]
    assert new is actors.engines.made[2]
    assert actors.calls == [
        ("engine 1", "kill"),
        ("engine 2", "start"),
        ("engine 0", "target_checksum"),
        ("engine 2", "target_checksum"),
        ("push", ["engine 2"], SNAPSHOT, 1),
        ("engine 2", "set_drafting", False),
        ("engine 2", "sleep", 0),
        ("agent 0", "replace_server", 1, new),
        ("agent 1", "replace_server", 1, new),
    ]
    assert new in actors.placement.actors
    assert old not in actors.placement.actors
    assert fleet.counts["engine_restarts"] == 1
    assert caplog.messages[-1] == "engine 1 was replaced in 1 s, HTTP at u"
    assert not fleet.replace_failed(), "the new one is healthy"


def test_an_engine_that_is_replaced_before_the_first_push_stays_awake_and_drafts(
    monkeypatch: pytest.MonkeyPatch,
):
    fleet, actors = fake_fleet(monkeypatch)
    actors.reasons["engine 0"] = "died"
    fleet.replace_failed()
    assert [call[1] for call in actors.calls] == [
        "kill",
        "start",
        "target_checksum",
        "set_drafting",
        "replace_server",
    ]
    assert ("engine 1", "set_drafting", True) in actors.calls


def test_a_replacement_with_another_target_is_never_used(monkeypatch: pytest.MonkeyPatch):
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    actors.engines.answers["target_checksum"] = "other"
    actors.reasons["engine 1"] = "died"
    with pytest.raises(WeightSyncError, match="checksum other, expected t"):
        fleet.replace_failed()
    assert not [call for call in actors.calls if call[1] in ("set_drafting", "replace_server")]
    assert fleet.counts["engine_restarts"] == 0


def test_agent_loops_get_a_new_teacher_by_name_and_replica_also_those_made_later(
    monkeypatch: pytest.MonkeyPatch,
):
    fleet, actors = fake_fleet(monkeypatch, teachers=["math", "code", "math"])
    actors.reasons["teacher 2"] = "died"
    assert fleet.replace_failed()
    new = actors.teachers.made[3]
    assert actors.calls == [
        ("teacher 2", "kill"),
        ("teacher 3", "start"),
        ("agent 0", "replace_teacher", "math", 1, new),
    ]
    assert new in actors.placement.actors
    assert fleet.counts["teacher_restarts"] == 1
    agent = fleet._new_agent(0)
    *_, teachers, role, log_path = agent.made_with
    math, code, _, _ = actors.teachers.made
    assert teachers == {"math": [math, new], "code": [code]}
    assert (role, log_path) == ("agent loop 0", "logs/agent_0.log")


def test_a_dead_agent_loop_does_not_stop_a_replacement(monkeypatch: pytest.MonkeyPatch):
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    actors.agents.made[0].answers["replace_server"] = ray.exceptions.ActorDiedError()
    actors.reasons["engine 0"] = "died"
    assert fleet.replace_failed()
    assert actors.calls[-1] == ("agent 1", "replace_server", 0, fleet.servers[0])


def test_engines_are_switched_only_when_that_changes_something(monkeypatch: pytest.MonkeyPatch):
    fleet, actors = fake_fleet(monkeypatch)
    assert all(fleet.set_drafting(on) for on in (True, False, False, True, True))
    assert actors.calls == [("engine 0", "set_drafting", on) for on in (False, True)]


def test_where_one_engine_cannot_switch_all_keep_drafting(monkeypatch: pytest.MonkeyPatch):
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    actors.engines.made[1].answers["set_drafting"] = False
    assert [fleet.set_drafting(on) for on in (False, False, True)] == [False, False, True]
    names = ("engine 0", "engine 1")
    assert actors.calls == [(name, "set_drafting", on) for on in (False, True) for name in names]


@dataclass
class Clock:
    """Stands for the module `time`."""

    monotonic: Callable[[], float]


def test_throughput_counts_the_tokens_of_all_engines_with_empty_prefix_caches(
    monkeypatch: pytest.MonkeyPatch,
):
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    for engine, tokens in zip(actors.engines.made, (5, 7), strict=True):
        engine.answers["generate_tokens"] = tokens
    monkeypatch.setattr("verl_opd.controller.fleet.time", Clock(iter([10.0, 12.5]).__next__))
    prompts = [Prompt(str(i), "t", (i,), ()) for i in range(3)]
    assert fleet.throughput(prompts, {"max_tokens": 4}) == (12, 2.5)
    assert actors.calls == [
        ("engine 0", "reset_prefix_cache"),
        ("engine 1", "reset_prefix_cache"),
        ("engine 0", "generate_tokens", [(0,), (2,)], {"max_tokens": 4}),
        ("engine 1", "generate_tokens", [(1,)], {"max_tokens": 4}),
    ]


def test_seconds_of_all_recorders_add_up(monkeypatch: pytest.MonkeyPatch):
    fleet, actors = fake_fleet(monkeypatch, engines=2)
    for engine, seconds in zip(actors.engines.made, (0.5, 1.25), strict=True):
        engine.answers["recorder_stats"] = {"seconds": seconds}
    assert fleet.recorder_seconds() == 1.75
