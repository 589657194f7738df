"""The rollout side of a run as one object: servers, router and agent loops, moved through their
phases together and replaced when they die.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from verl_opd.config.schema import Config
from verl_opd.controller.faults import Restarts, failure, first_line
from verl_opd.controller.placement import Placement, driver_options
from verl_opd.data.prompts import Prompt
from verl_opd.engines.settings import EngineSettings
from verl_opd.errors import RolloutError, WeightSyncError, WorkerDied
from verl_opd.opd.trace import RolloutSample
from verl_opd.rollout.agent_loop import AgentLoopWorkerActor, SampleFailure
from verl_opd.rollout.phases import Phase, PhaseMachine
from verl_opd.rollout.router import RouterActor
from verl_opd.rollout.server import RolloutServerActor
from verl_opd.rollout.sync import SyncReport, push_draft
from verl_opd.rollout.teacher import TeacherServerActor, TeacherSettings
from verl_opd.snapshot import DraftSnapshot

log = logging.getLogger(__name__)

_STOP_SECONDS = 60.0


class Fleet:
    """Every replica of a run. Methods act on all of them and return when all are done.

    A server or agent loop that dies or hangs is replaced, as long as `restarts` allow; the samples
    it was working on are run again, and no others. `snapshot` (set by the loop) gives the draft
    that all engines hold, for an engine that has just been started. `logs` is the directory for
    the logs of agent loops; servers have theirs in their settings.
    """

    def __init__(
        self,
        cfg: Config,
        placement: Placement,
        settings: Sequence[EngineSettings],
        logs: Path,
        teachers: Sequence[TeacherSettings] = (),
        restarts: Restarts | None = None,
    ) -> None:
        self._cfg, self._placement, self._settings = cfg, placement, list(settings)
        self._logs, self._teacher_settings = logs, list(teachers)
        self._restarts = restarts or Restarts(cfg.trainer.max_restarts)
        self.counts = {"engine_restarts": 0, "agent_restarts": 0, "rerun_samples": 0}
        if teachers:
            self.counts["teacher_restarts"] = 0
        self.snapshot: Callable[[], DraftSnapshot] | None = None
        self._drafting = True  # whether engines draft
        self._switchable = True  # until an engine turns out not to support switching it
        self.servers = [self._new_server(index) for index in range(len(settings))]
        self.phases = [PhaseMachine(index) for index in range(len(settings))]
        self._teachers = [self._new_teacher(index) for index in range(len(teachers))]
        self._router = RouterActor.options(**driver_options()).remote(len(settings))
        placement.actors.append(self._router)
        count = cfg.rollout.agent.num_workers or cfg.trainer.n_student_workers
        self._agents = [self._new_agent(index) for index in range(count)]

    def _new_server(self, index: int) -> Any:
        server = RolloutServerActor.options(**self._placement.actor_options(index)).remote(
            self._settings[index]
        )
        self._placement.actors.append(server)
        return server

    def _new_teacher(self, index: int) -> Any:
        server = TeacherServerActor.options(**self._placement.teacher_options(index)).remote(
            self._teacher_settings[index]
        )
        self._placement.actors.append(server)
        return server

    def _new_agent(self, index: int) -> Any:
        rollout = self._cfg.rollout
        teachers: dict[str, list[Any]] = {}
        for settings, server in zip(self._teacher_settings, self._teachers, strict=True):
            teachers.setdefault(settings.name, []).append(server)
        agent = AgentLoopWorkerActor.options(**driver_options()).remote(
            rollout.agent.loop,
            self.servers,
            self._router,
            rollout.agent.max_concurrency,
            rollout.request_timeout,
            teachers,
            f"agent loop {index}",
            str(self._logs / f"agent_{index}.log"),
        )
        self._placement.actors.append(agent)
        return agent

    def start(self) -> list[dict[str, Any]]:
        """Start all engines, teachers included, and return the start reports of those that draft;
        RolloutError when one does not start within rollout.start_timeout.
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
                    f"(checksum {found}, expected {self._target}): its rollouts since the last "
                    "check do not follow the target"
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
        """One sample per prompt, in prompt order; with `score`, scored by the teacher servers of
        the run, if there are any.
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
                    f"all {before} samples were aborted, {left[0].sample_id} among them, although "
                    "every engine is healthy; see logs/rollout_*.log"
                )
            if left:
                self.counts["rerun_samples"] += len(left)
                log.info(
                    f"{len(left)} of {len(prompts)} samples are run again: "
                    f"{', '.join(p.sample_id for p in left[:8])}"
                )
        return [by_id[prompt.sample_id] for prompt in prompts]

    def _attempt(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], draft_version: int, score: bool
    ) -> tuple[list[RolloutSample | SampleFailure], bool]:
        """The outcome of each prompt, and whether a process was replaced. RolloutError when samples
        failed although every process is healthy.
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
            # raised inside a living agent loop; also an actor error when a server that it called
            # has died
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayActorError as error:
                self._restarts.spend(f"agent loop worker {index} died ({first_line(error)})")
                self._discard(self._agents[index])
                self._agents[index] = self._new_agent(index)
                self.counts["agent_restarts"] += 1
                replaced = True
        failures = [outcome for outcome in outcomes if isinstance(outcome, SampleFailure)]
        replaced = self.replace_failed() or replaced
        if replaced:  # nothing is in flight now; dead agent loops did not release their requests
            ray.get(self._router.reset.remote())
        if failures and not replaced:
            raise RolloutError(f"sample {failures[0].sample_id}: {failures[0].reason}")
        return outcomes, replaced

    # -- health ------------------------------------------------------------------------------------

    def deaths(self) -> list[str]:
        """Servers that cannot continue, teachers included, and why."""
        engines = [f"engine {index} is lost ({why})" for index, why in _failed(self.servers)]
        return engines + [
            f"teacher {index} is lost ({why})" for index, why in _failed(self._teachers)
        ]

    def replace_failed(self) -> bool:
        """Replace every server that does not answer, died or hangs; returns whether there was one.
        RestartsExhausted when no restart is left, WorkerDied when a whole node is lost.
        """
        engines, teachers = _failed(self.servers), _failed(self._teachers)
        # checked after the servers, which may stop answering before Ray notices; a lost node takes
        # trainer ranks with it
        if lost := self._placement.lost_nodes():
            raise WorkerDied(f"node {', '.join(lost)} is lost")
        for index, reason in engines:
            self._restarts.spend(f"engine {index} is lost ({reason})")
            self._replace_server(index)
        for index, reason in teachers:
            self._restarts.spend(f"teacher {index} is lost ({reason})")
            self._replace_teacher(index)
        return bool(engines or teachers)

    def _replace_server(self, index: int) -> None:
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
        self._announce("replace_server", index, server)
        self.counts["engine_restarts"] += 1
        log.info(
            f"engine {index} was replaced in {report['seconds']:.0f} s, HTTP at {report['url']}"
        )

    def _replace_teacher(self, index: int) -> None:
        """A new teacher server in the place of a dead one."""
        self._discard(self._teachers[index])
        server = self._teachers[index] = self._new_teacher(index)
        (report,) = self._start([server])
        names = [settings.name for settings in self._teacher_settings]
        self._announce("replace_teacher", names[index], names[:index].count(names[index]), server)
        self.counts["teacher_restarts"] += 1
        log.info(f"teacher {index} ({names[index]}) was replaced in {report['seconds']:.0f} s")

    def _announce(self, method: str, *place: Any) -> None:
        """Give every agent loop the server that is new in `place`."""
        for agent in self._agents:
            try:
                ray.get(getattr(agent, method).remote(*place))
            # the next rollout replaces it by one that has the current servers
            except ray.exceptions.RayActorError:
                continue

    def _discard(self, actor: Any) -> None:
        ray.kill(actor, no_restart=True)
        self._placement.actors.remove(actor)

    def set_drafting(self, enabled: bool) -> bool:
        """Turn drafting on or off between rollouts; nothing happens where it is so already. False
        when an engine does not support that: drafting then stays on everywhere, for good.
        """
        if enabled == self._drafting or not self._switchable:
            return enabled == self._drafting
        done = all(ray.get([server.set_drafting.remote(enabled) for server in self.servers]))
        if not done and not enabled:
            ray.get([server.set_drafting.remote(True) for server in self.servers])
        self._drafting, self._switchable = enabled or not done, done
        return done

    # -- phases ------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._advance("sleep")
        ray.get(
            [server.sleep.remote(self._placement.device.sleep_level) for server in self.servers]
        )

    def sync(self, snapshot: DraftSnapshot) -> SyncReport:
        """Wake weights, push the draft and check what engines read back, wake the KV cache, drop
        cached prefixes: the only allowed order.
        """
        self.replace_failed()  # an engine may have died asleep, during the update
        self._advance("wake_weights")
        ray.get([server.wake.remote(["weights"]) for server in self.servers])
        self._advance("sync")
        report = push_draft(self.servers, snapshot)
        self._advance("wake_kv_cache")
        ray.get([server.wake.remote(["kv_cache"]) for server in self.servers])
        self._advance("reset_prefix_cache")
        ray.get([server.reset_prefix_cache.remote() for server in self.servers])
        return report

    def _advance(self, action: str) -> None:
        for phase in self.phases:
            phase.advance(action)

    # -- measurements ------------------------------------------------------------------------------

    def recorder_metrics(self) -> dict[str, float]:
        """Counters of all recorders since the engines started, added up over replicas, and how
        often a process was replaced. A trace that does not explain its response is broken.
        """
        names, counted = ("steps", "errors", "expired", "broken_traces"), dict[str, float]()
        try:
            stats = _recorder_stats(self.servers)
        except (ray.exceptions.RayError, RolloutError):
            log.info("an engine does not answer; the next rollout checks and replaces it")
        else:
            counted = {
                f"opd/recorder/{name}": float(sum(entry[name] for entry in stats)) for name in names
            }
        return {
            **counted,
            **{f"rollout/{name}": float(count) for name, count in self.counts.items()},
        }

    def recorder_seconds(self) -> float:
        """Seconds spent inside the recorders of all replicas so far."""
        return float(sum(entry["seconds"] for entry in _recorder_stats(self.servers)))

    def set_recording(self, enabled: bool) -> None:
        """Turn all recorders on or off between rollouts; while they are off, no trace is
        recorded.
        """
        ray.get([server.set_recording.remote(enabled) for server in self.servers])

    def throughput(self, prompts: Sequence[Prompt], sampling: dict[str, Any]) -> tuple[int, float]:
        """(tokens, seconds) of generating from all prompts, spread over all replicas, with empty
        prefix caches and without collecting traces.
        """
        count = len(self.servers)
        ray.get([server.reset_prefix_cache.remote() for server in self.servers])
        started = time.monotonic()
        tokens: list[int] = ray.get(
            [
                server.generate_tokens.remote([p.prompt_ids for p in prompts[i::count]], sampling)
                for i, server in enumerate(self.servers)
            ]
        )
        return sum(tokens), time.monotonic() - started

    # -- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End engines and HTTP, then the servers themselves. A server that does not answer is
        killed, and its processes are cleaned up.
        """
        servers = [*self.servers, *self._teachers]
        _, late = ray.wait(
            [server.stop.remote() for server in servers],
            num_returns=len(servers),
            timeout=_STOP_SECONDS,
        )
        if late:
            log.warning(
                f"{len(late)} of {len(servers)} engines did not stop within {_STOP_SECONDS:.0f} s "
                "and are killed"
            )
        for server in servers:
            ray.kill(server, no_restart=True)


def _failed(servers: Sequence[Any]) -> list[tuple[int, str]]:
    """(index, reason) of every server that cannot continue."""
    return [(i, reason) for i, server in enumerate(servers) if (reason := failure(server))]


def _recorder_stats(servers: Sequence[Any]) -> list[dict[str, Any]]:
    stats: list[dict[str, Any]] = ray.get([server.recorder_stats.remote() for server in servers])
    return stats
