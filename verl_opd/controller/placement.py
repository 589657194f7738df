"""Ray: start or join it, reserve one bundle per student worker, and give the options of each
actor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from verl_opd.config.schema import Config
from verl_opd.devices import Device, available_cores, split_cores
from verl_opd.errors import ConfigError
from verl_opd.process import clean_up_after

log = logging.getLogger(__name__)

_BUNDLE_CPUS = 1.0


@dataclass(frozen=True)
class Slot:
    """Where one student worker or teacher server runs."""

    index: int  # of its bundle in the placement group
    node_id: str  # Ray's id of the node
    node_ip: str  # address of the node
    cores: tuple[int, ...]  # its share of that machine's cores


@dataclass(kw_only=True)
class Placement:
    """Reserved resources of a run. `close` frees what this process took, and nothing else."""

    group: PlacementGroup  # one bundle per student worker
    device: Device
    slots: list[Slot]  # one per bundle of `group`
    teacher_group: PlacementGroup | None = None  # one bundle per teacher server
    teacher_slots: list[Slot] = field(default_factory=list)  # one per bundle of `teacher_group`
    actors: list[Any] = field(default_factory=list)  # handles of all actors, ended by `close`

    @property
    def on_this_node(self) -> bool:
        """Whether every student worker shares the driver's node."""
        return {slot.node_ip for slot in self.slots} == {ray.util.get_node_ip_address()}

    def lost_nodes(self) -> list[str]:
        """Addresses of nodes that held a part of this run and are gone."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return sorted(
            {
                slot.node_ip
                for slot in (*self.slots, *self.teacher_slots)
                if slot.node_id not in alive
            }
        )

    def actor_options(self, index: int) -> dict[str, Any]:
        """Options for one of the two actors (trainer rank, rollout server) that share bundle
        `index`.
        """
        return self._options(self.group, index, 0.5)

    def teacher_options(self, index: int) -> dict[str, Any]:
        """Options for the teacher server that has teacher bundle `index` to itself."""
        assert self.teacher_group is not None
        return self._options(self.teacher_group, index, 1.0)

    def _options(self, group: PlacementGroup, index: int, share: float) -> dict[str, Any]:
        return {
            "num_cpus": _BUNDLE_CPUS * share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
            **self.device.actor_options(share),
        }

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        for group in (self.group, self.teacher_group):
            if group is not None:
                remove_placement_group(group)
        ray.shutdown()


def driver_options() -> dict[str, Any]:
    """Options for light actors (router, agent loops): on the driver's node, no reserved core."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}


def start_ray(cfg: Config, teachers: int = 0) -> None:
    """Join the cluster at ray.address or RAY_ADDRESS. Without either, start a local one with room
    for all workers, which ends with this process.
    """
    address = cfg.ray.address or os.environ.get("RAY_ADDRESS")
    runtime_env = dict(cfg.ray.runtime_env)
    runtime_env.setdefault("env_vars", {})
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "error",
        "runtime_env": runtime_env,
    }
    if address:
        ray.init(address=address, **quiet)
        return
    clean_up_after(children=True)  # a local Ray's agents outlive a killed driver by a minute
    cpus = cfg.ray.num_cpus or max(len(available_cores()), cfg.trainer.n_student_workers + teachers)
    options = {"address": "local", "num_cpus": cpus, "include_dashboard": False, **quiet}
    try:
        ray.init(**options)
    except Exception as error:
        if not _raylet_was_late(error):
            raise
        log.warning("Ray did not start within its 30 s; trying once more")
        ray.shutdown()
        ray.init(**options)


def _raylet_was_late(error: Exception) -> bool:
    """Whether a busy machine exceeded the 30 s that Ray gives a raylet to register. Ray has no type
    for it: ray/_private/node.py (2.60), Node.__init__, raises a bare Exception with this text.
    """
    return "timed out during startup" in str(error)


def place(cfg: Config, device: Device, teachers: int = 0, timeout: float = 60.0) -> Placement:
    """Start or join Ray and reserve one bundle for each of trainer.n_student_workers and of
    `teachers` servers; ConfigError when the cluster is too small.
    """
    start_ray(cfg, teachers)
    groups: list[PlacementGroup] = []
    try:
        workers = cfg.trainer.n_student_workers
        bundle = {"CPU": _BUNDLE_CPUS, **device.bundle()}
        _check_size(bundle, workers, teachers)
        for count in filter(None, (workers, teachers)):
            groups.append(_reserve(bundle, count, timeout))
        every = _slots([(group, i) for group in groups for i in range(group.bundle_count)])
        slots = every[:workers]
        teacher_slots = [replace(slot, index=i) for i, slot in enumerate(every[workers:])]
        nodes = len({slot.node_id for slot in slots})
        if cfg.trainer.nnodes > 1 and nodes != cfg.trainer.nnodes:
            raise ConfigError(
                f"trainer.nnodes={cfg.trainer.nnodes}, but Ray placed the student workers on "
                f"{nodes} node(s): correct the number"
            )
        return Placement(
            group=groups[0],
            device=device,
            slots=slots,
            teacher_group=groups[1] if teachers else None,
            teacher_slots=teacher_slots,
        )
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        ray.shutdown()
        raise


def _check_size(bundle: dict[str, float], workers: int, teachers: int) -> None:
    have, count = ray.cluster_resources(), workers + teachers
    short = {
        name: (amount * count, have.get(name, 0.0))
        for name, amount in bundle.items()
        if have.get(name, 0.0) < amount * count
    }
    if short:
        wanted = ", ".join(
            f"{need:g} {name} (Ray has {got:g})" for name, (need, got) in short.items()
        )
        and_teachers = f" and {teachers} teacher server(s)" if teachers else ""
        raise ConfigError(
            f"trainer.n_student_workers={workers}{and_teachers} needs {wanted}: lower it, or join "
            "a larger cluster through RAY_ADDRESS"
        )


def _reserve(bundle: dict[str, float], count: int, timeout: float) -> PlacementGroup:
    group = placement_group([bundle] * count, strategy="PACK")
    if group.wait(timeout):
        return group
    remove_placement_group(group)
    _check_size(bundle, count, 0)  # Ray may have counted a node that was lost a moment before
    raise ConfigError(
        f"Ray could not reserve {count} bundles of {bundle} in {timeout:.0f} s: other jobs use "
        "the cluster's resources"
    )


def _slots(bundles: Sequence[tuple[PlacementGroup, int]]) -> list[Slot]:
    """One slot per bundle; all bundles of a node share its cores equally."""
    probes = [
        _probe_node.options(
            num_cpus=_BUNDLE_CPUS / 2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote()
        for group, index in bundles
    ]
    nodes: list[tuple[str, str, list[int]]] = ray.get(probes)
    slots = []
    for index, (node_id, node_ip, cores) in enumerate(nodes):
        mates = [i for i, (_, other, _) in enumerate(nodes) if other == node_ip]
        share = split_cores(cores, len(mates))[mates.index(index)]
        slots.append(Slot(index, node_id, node_ip, tuple(share)))
    return slots


@ray.remote
def _probe_node() -> tuple[str, str, list[int]]:
    return (
        ray.get_runtime_context().get_node_id(),
        ray.util.get_node_ip_address(),
        available_cores(),
    )
