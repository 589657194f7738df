"""The rollout side of a run as one object: servers, router and agent loops, moved through their
phases together and replaced when they die.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from verl_opd.config.schema import Config
from verl_opd.controller.faults import Restarts, failure, first_line
from verl_opd.controller.phases import Phase, PhaseMachine
from verl_opd.controller.placement import Placement, driver_options
from verl_opd.data.prompts import Prompt
from verl_opd.errors import RolloutError, WeightSyncError, WorkerDied
from verl_opd.opd.trace import RolloutSample
from verl_opd.rollout.agent_loop import AgentLoopWorkerActor, SampleFailure
from verl_opd.rollout.router import RouterActor
from verl_opd.rollout.server import EngineSettings, RolloutServerActor
from verl_opd.rollout.sync import SyncReport, push_draft
from verl_opd.rollout.teacher import TeacherServerActor, TeacherSettings
from verl_opd.snapshot import DraftSnapshot

_STOP_SECONDS = 60.0


class Fleet:
    """Every replica of a run. Methods act on all of them and return when all are done.

    A server or agent loop that dies is started again, as long as `restarts` allow; what it was
    working on is run again, and nothing else. `say` is told; `snapshot` (set by the loop) gives the
    draft that all engines hold, for a server that has just been started.
    """

    def __init__(
        self,
        cfg: Config,
        placement: Placement,
        settings: Sequence[EngineSettings],
        teachers: Sequence[TeacherSettings] = (),
        say: Callable[[str], None] = print,
        restarts: Restarts | None = None,
    ) -> None:
        self._cfg, self._placement, self._settings, self._say = cfg, placement, list(settings), say
        self._restarts = restarts or Restarts(cfg.trainer.max_restarts)
        self.counts = {"engine_restarts": 0, "agent_restarts": 0, "rerun_samples": 0}
        self.snapshot: Callable[[], DraftSnapshot] | None = None
        self._drafting = True
        self.servers = [self._new_server(index) for index in range(len(settings))]
        self.phases = [PhaseMachine(index) for index in range(len(settings))]
        self._teachers: list[Any] = []
        self._by_name: dict[str, list[Any]] = {}
        for index, teacher in enumerate(teachers):
            server = TeacherServerActor.options(**placement.teacher_options(index)).remote(teacher)
            self._teachers.append(server)
            self._by_name.setdefault(teacher.name, []).append(server)
        placement.actors.extend(self._teachers)
        self._router = RouterActor.options(**driver_options()).remote(len(settings))
        placement.actors.append(self._router)
        count = cfg.rollout.agent.num_workers or cfg.trainer.n_student_workers
        self._agents = [self._new_agent() for _ in range(count)]

    def _new_server(self, index: int) -> Any:
        server = RolloutServerActor.options(**self._placement.actor_options(index)).remote(
            self._settings[index]
        )
        self._placement.actors.append(server)
        return server

    def _new_agent(self) -> Any:
        rollout = self._cfg.rollout
        agent = AgentLoopWorkerActor.options(**driver_options()).remote(
            rollout.agent.loop,
            self.servers,
            self._router,
            rollout.agent.max_concurrency,
            rollout.request_timeout,
            self._by_name,
        )
        self._placement.actors.append(agent)
        return agent

    def start(self) -> list[dict[str, Any]]:
        """Bring all engines up, teachers included, and return the probe reports of those that
        draft; RolloutError when one does not come up in rollout.start_timeout.
        """
        reports = self._start([*self.servers, *self._teachers])
        self._target = self._target_checksums()[0]
        self.prove_target()
        return reports[: len(self.servers)]

    def _target_checksums(self) -> list[str]:
        checksums: list[str] = ray.get([server.target_checksum.remote() for server in self.servers])
        return checksums

    def prove_target(self) -> None:
        """WeightSyncError unless every engine still holds the frozen target it started with."""
        for index, found in enumerate(self._target_checksums()):
            if found != self._target:
                raise WeightSyncError(
                    f"engine {index} does not hold the target that engine 0 loaded at the start "
                    f"(checksum {found}, there {self._target}): "
                    "what it rolled out since the last proof is not the target's"
                )

    def _start(self, servers: Sequence[Any]) -> list[dict[str, Any]]:
        timeout = self._cfg.rollout.start_timeout
        try:
            reports: list[dict[str, Any]] = ray.get(
                [server.start.remote() for server in servers], timeout=timeout
            )
        except ray.exceptions.GetTimeoutError as error:
            raise RolloutError(
                f"engines did not start within rollout.start_timeout={timeout:.0f} s; see "
                "logs/rollout_*.log and logs/teacher_*.log"
            ) from error
        return reports

    # -- rollouts ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: dict[str, Any],
        draft_version: int,
        score: bool = False,
    ) -> list[RolloutSample]:
        """One sample per prompt, in prompt order; with `score`, also scored by the teacher servers
        that are there.
        """
        for phase in self.phases:
            phase.require_rollout()
        by_id: dict[str, RolloutSample] = {}
        left = list(prompts)
        while left:
            outcomes, replaced = self._attempt(left, sampling, draft_version, score)
            good = {
                outcome.sample_id: outcome
                for outcome in outcomes
                if isinstance(outcome, RolloutSample) and outcome.finish_reason != "abort"
            }
            by_id.update(good)
            before, left = len(left), [prompt for prompt in left if prompt.sample_id not in by_id]
            if len(left) == before and not replaced:
                raise RolloutError(
                    f"none of {before} samples came back, {left[0].sample_id} among them, and "
                    "every engine says it is well"
                )
            if left:
                self.counts["rerun_samples"] += len(left)
                self._say(
                    f"{len(left)} of {len(prompts)} samples are run again: "
                    f"{', '.join(p.sample_id for p in left[:8])}"
                )
        return [by_id[prompt.sample_id] for prompt in prompts]

    def _attempt(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], draft_version: int, score: bool
    ) -> tuple[list[RolloutSample | SampleFailure], bool]:
        """What became of each prompt, and whether somebody died meanwhile, who is there again now.
        RolloutError when samples failed and nobody died.
        """
        shares = [list(prompts[i :: len(self._agents)]) for i in range(len(self._agents))]
        work = {
            i: self._agents[i].run.remote(share, sampling, draft_version, score)
            for i, share in enumerate(shares)
            if share
        }
        outcomes: list[RolloutSample | SampleFailure] = []
        replaced = False
        for index, part in work.items():
            try:
                outcomes.extend(ray.get(part))
            # raised in the agent loop, which lives: the death of somebody it talks to looks like
            # its own
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayActorError as error:
                self._restarts.spend(f"agent loop worker {index} died ({first_line(error)})")
                self._discard(self._agents[index])
                self._agents[index] = self._new_agent()
                self.counts["agent_restarts"] += 1
                replaced = True
        failures = [outcome for outcome in outcomes if isinstance(outcome, SampleFailure)]
        replaced = self.replace_failed() or replaced
        if replaced:  # nothing is in flight now, and what died has not signed off
            ray.get(self._router.reset.remote())
        if failures and not replaced:
            raise RolloutError(f"sample {failures[0].sample_id}: {failures[0].reason}")
        return outcomes, replaced

    # -- health ------------------------------------------------------------------------------------

    def deaths(self) -> list[str]:
        """Servers that cannot go on, teachers included, and why."""
        engines = [
            f"engine {index} is lost ({why})"
            for index, server in enumerate(self.servers)
            if (why := failure(server))
        ]
        return engines + [
            f"teacher {index} is lost ({why})"
            for index, server in enumerate(self._teachers)
            if (why := failure(server))
        ]

    def replace_failed(self) -> bool:
        """Start every server again that no longer answers or says it cannot go on; whether there
        was one. WorkerDied when restarts are used up, or a whole node is lost.
        """
        failed = {
            index: reason
            for index, server in enumerate(self.servers)
            if (reason := failure(server))
        }
        if (
            lost := self._placement.lost_nodes()
            # asked after the engines, whose silence may be the first sign; trainer ranks lived
            # there too
        ):
            raise WorkerDied(f"node {', '.join(lost)} is lost")
        for index, reason in failed.items():
            self._restarts.spend(f"engine {index} is lost ({reason})")
            self._replace(index)
        return bool(failed)

    def _replace(self, index: int) -> None:
        """A new server in the place of a dead one, with the draft, drafting switch and phase of the
        others.
        """
        self._discard(self.servers[index])
        server = self.servers[index] = self._new_server(index)
        (report,) = self._start([server])
        self.prove_target()
        if self.snapshot is not None:
            push_draft([server], self.snapshot(), first=index)
        ray.get(server.set_drafting.remote(self._drafting))
        if self.phases[index].phase is Phase.ASLEEP:
            ray.get(server.sleep.remote(self._placement.device.sleep_level))
        for agent in self._agents:
            try:
                ray.get(agent.replace_server.remote(index, server))
            except (
                ray.exceptions.RayActorError
            ):  # found, and replaced with the current servers, at the next rollout
                continue
        self.counts["engine_restarts"] += 1
        self._say(f"engine {index} is back ({report['seconds']:.0f} s), HTTP at {report['url']}")

    def _discard(self, actor: Any) -> None:
        ray.kill(actor, no_restart=True)
        self._placement.actors.remove(actor)

    def set_drafting(self, enabled: bool) -> bool:
        """Turn drafting on or off between rollouts; False when an engine cannot, which leaves
        drafting on everywhere.
        """
        done = all(ray.get([server.set_drafting.remote(enabled) for server in self.servers]))
        if not done and not enabled:
            ray.get([server.set_drafting.remote(True) for server in self.servers])
        self._drafting = enabled if done else True
        return done

    # -- phases ------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._advance("sleep")
        ray.get(
            [server.sleep.remote(self._placement.device.sleep_level) for server in self.servers]
        )

    def sync(self, snapshot: DraftSnapshot) -> SyncReport:
        """Wake weights, push and prove the draft, wake the KV cache, drop cached prefixes: the only
        order that is allowed.
        """
        self.replace_failed()  # an engine may have died asleep, while the trainers worked
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
        """What the recorders counted since the engines started, added up over replicas, and how
        often something died; a broken trace is one that does not explain its response.
        """
        names, counted = ("steps", "errors", "expired", "broken_traces"), dict[str, float]()
        try:
            stats = ray.get([server.recorder_stats.remote() for server in self.servers])
        except (ray.exceptions.RayError, RolloutError):
            self._say("an engine does not answer; it is looked after at the next rollout")
        else:
            counted = {
                f"opd/recorder/{name}": float(sum(entry[name] for entry in stats)) for name in names
            }
        return {
            **counted,
            **{f"rollout/{name}": float(count) for name, count in self.counts.items()},
        }

    def _advance(self, action: str) -> None:
        for phase in self.phases:
            phase.advance(action)

    def stop(self) -> None:
        """End engines and HTTP, and the servers themselves; what those leave behind that did not
        answer is cleaned up after them.
        """
        servers = [*self.servers, *self._teachers]
        _, late = ray.wait(
            [server.stop.remote() for server in servers],
            num_returns=len(servers),
            timeout=_STOP_SECONDS,
        )
        if late:
            self._say(
                f"{len(late)} of {len(servers)} engines did not stop within {_STOP_SECONDS:.0f} s "
                "and are killed"
            )
        for server in servers:
            ray.kill(server, no_restart=True)
