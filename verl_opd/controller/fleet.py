"""The rollout side of a run as one object: servers, router and agent loops, moved through their phases together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ray

from verl_opd.config.schema import Config
from verl_opd.controller.phases import PhaseMachine
from verl_opd.controller.placement import Placement, driver_options
from verl_opd.data.prompts import Prompt
from verl_opd.drafts.snapshot import DraftSnapshot
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import RolloutSample
from verl_opd.rollout.agent_loop import AgentLoopWorker
from verl_opd.rollout.router import RouterActor
from verl_opd.rollout.server import EngineSettings, RolloutServer
from verl_opd.rollout.sync import SyncReport, push_draft
from verl_opd.rollout.teacher import TeacherServer, TeacherSettings


class Fleet:
    """Every replica of a run. Methods act on all of them and return when all are done."""

    def __init__(
        self, cfg: Config, placement: Placement, settings: Sequence[EngineSettings], teachers: Sequence[TeacherSettings] = ()
    ) -> None:
        self._timeout = cfg.rollout.start_timeout
        self._sleep_level = placement.device.sleep_level
        self.servers = [
            RolloutServer.options(**placement.actor_options(slot.index)).remote(setting)
            for slot, setting in zip(placement.slots, settings, strict=True)
        ]
        placement.actors.extend(self.servers)
        self.phases = [PhaseMachine(index) for index in range(len(self.servers))]
        self._teachers: list[Any] = []
        by_name: dict[str, list[Any]] = {}
        for index, teacher in enumerate(teachers):
            server = TeacherServer.options(**placement.teacher_options(index)).remote(teacher)
            self._teachers.append(server)
            by_name.setdefault(teacher.name, []).append(server)
        placement.actors.extend(self._teachers)
        router = RouterActor.options(**driver_options()).remote(len(self.servers))
        count = cfg.rollout.agent.num_workers or cfg.trainer.n_student_workers
        self._agents = [
            AgentLoopWorker.options(**driver_options()).remote(
                cfg.rollout.agent.loop, self.servers, router, cfg.rollout.agent.max_concurrency, cfg.rollout.request_timeout, by_name
            )
            for _ in range(count)
        ]
        placement.actors.extend([router, *self._agents])

    def start(self) -> list[dict[str, Any]]:
        """Bring all engines up, teachers included, and return the probe reports of those that draft; RolloutError when one does not come up in
        rollout.start_timeout."""
        everyone = [*self.servers, *self._teachers]
        try:
            reports: list[dict[str, Any]] = ray.get([server.start.remote() for server in everyone], timeout=self._timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise RolloutError(
                f"engines did not start within rollout.start_timeout={self._timeout:.0f} s; see logs/rollout_*.log and logs/teacher_*.log"
            ) from error
        return reports[: len(self.servers)]

    def generate(self, prompts: Sequence[Prompt], sampling: dict[str, Any], draft_version: int, score: bool = False) -> list[RolloutSample]:
        """One sample per prompt, in prompt order; with `score`, also scored by the teacher servers that are there."""
        for phase in self.phases:
            phase.require_rollout()
        shares = [list(prompts[i :: len(self._agents)]) for i in range(len(self._agents))]
        work = [agent.run.remote(share, sampling, draft_version, score) for agent, share in zip(self._agents, shares, strict=True) if share]
        by_id = {sample.sample_id: sample for part in ray.get(work) for sample in part}
        return [by_id[prompt.sample_id] for prompt in prompts]

    def set_drafting(self, enabled: bool) -> bool:
        """Turn drafting on or off between rollouts; False when an engine cannot, which leaves drafting on everywhere."""
        done = all(ray.get([server.set_drafting.remote(enabled) for server in self.servers]))
        if not done and not enabled:
            ray.get([server.set_drafting.remote(True) for server in self.servers])
        return done

    def sleep(self) -> None:
        self._advance("sleep")
        ray.get([server.sleep.remote(self._sleep_level) for server in self.servers])

    def sync(self, snapshot: DraftSnapshot) -> SyncReport:
        """Wake weights, push and prove the draft, wake the KV cache, drop cached prefixes: the only order that is allowed."""
        self._advance("wake_weights")
        ray.get([server.wake.remote(["weights"]) for server in self.servers])
        self._advance("sync")
        report = push_draft(self.servers, snapshot)
        self._advance("wake_kv_cache")
        ray.get([server.wake.remote(["kv_cache"]) for server in self.servers])
        self._advance("reset_prefix_cache")
        ray.get([server.reset_prefix_cache.remote() for server in self.servers])
        return report

    def recorder_metrics(self) -> dict[str, float]:
        """What the recorders counted since the engines started, added up over replicas; a broken trace is one that does not explain its response."""
        stats = ray.get([server.recorder_stats.remote() for server in self.servers])
        names = ("steps", "errors", "expired", "broken_traces")
        return {f"opd/recorder/{name}": float(sum(entry[name] for entry in stats)) for name in names}

    def _advance(self, action: str) -> None:
        for phase in self.phases:
            phase.advance(action)

    def stop(self) -> None:
        """End engines and HTTP. One that takes longer than a minute (a request that never ends) is left to `Placement.close`, which kills it."""
        try:
            ray.get([server.stop.remote() for server in [*self.servers, *self._teachers]], timeout=60)
        except ray.exceptions.GetTimeoutError:
            print("an engine did not stop within 60 s and is killed", file=sys.stderr)
