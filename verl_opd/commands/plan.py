"""`verl-opd plan`: what a recipe takes, by device and on the host, before anything starts:
placement, environments, memory.

Memory is arithmetic over shapes plus constants that were measured on a CPU (what a process holds
before it holds a model). Activations are counted at their worst: a full micro-batch, samples as
long as they may get. On accelerators the engine's share is what it is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_opd.ascend.limits import check_npu
from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.controller.job import draft_config_of
from verl_opd.devices import Device, actor_environment, resolve_device
from verl_opd.errors import ConfigError
from verl_opd.report.console import Console

GB = 1e9
# Measured on a CPU with models of a few kilobytes: proportional set size, so that what processes
# share is counted once.
PROCESS = {"trainer": 0.36, "engine": 0.92, "server": 0.5, "run": 1.15}
SLACK = 1.3  # what the C library's allocator keeps of a trainer's temporaries
CONTEXT = 1.0  # of an accelerator, per process that uses it: runtime, workspaces, communicators
GRAPHS = 1.5  # captured graphs, outside of the engine's own share


@dataclass(frozen=True)
class Sizes:
    """Shapes of target and draft. features: target layers that the draft reads; width: query heads
    x head size; kv: key heads x head size.
    """

    target_params: int
    target_hidden: int
    target_intermediate: int
    vocab: int
    features: int
    draft_params: int
    draft_layers: int
    draft_intermediate: int
    width: int
    kv: int
    block: int


@dataclass(frozen=True)
class Line:
    """One part of an estimate, in GB: of device memory, and of host memory."""

    what: str
    device: float = 0.0
    host: float = 0.0


def sizes_of(cfg: Config, target_config: Any, draft_config: Mapping[str, Any]) -> Sizes:
    """Shapes, read from configurations; parameters are counted on models without memory."""
    import torch

    from verl_opd.drafts import get_family

    family = get_family(cfg.draft.family)
    with torch.device("meta"):
        draft = family.build(draft_config, seed=0, init_std=0.0)
    heads = draft_config["num_attention_heads"]
    head = draft_config.get("head_dim") or draft_config["hidden_size"] // heads
    return Sizes(
        target_params=parameter_count(target_config),
        target_hidden=target_config.hidden_size,
        target_intermediate=target_config.intermediate_size,
        vocab=target_config.vocab_size,
        features=len(family.layer_ids(draft_config)),
        draft_params=sum(parameter.numel() for parameter in draft.parameters()),
        draft_layers=draft_config["num_hidden_layers"],
        draft_intermediate=draft_config["intermediate_size"],
        width=heads * head,
        kv=draft_config["num_key_value_heads"] * head,
        block=family.block_size(draft_config, cfg.rollout.num_speculative_tokens),
    )


def parameter_count(config: Any) -> int:
    """Of a model, counted on one without memory; tied weights once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def micro_batch(cfg: Config, sizes: Sizes) -> tuple[int, int, int]:
    """(context tokens, draft slots, slots of one sample) of the largest micro-batch: as many of the
    longest samples as fit, at least one.
    """
    context, opd = cfg.data.max_prompt_length + cfg.data.max_response_length, cfg.opd
    response = cfg.data.max_response_length
    blocks = 0
    if cfg.trainer.total_training_steps != 0:
        wanted = (opd.max_response_anchors or response) + (
            opd.max_rejected_tokens or response if opd.rejected_stream_weight else 0
        )
        blocks = min(response, wanted)
    if cfg.sft.steps:
        blocks = max(blocks, min(response, cfg.sft.anchors_per_sample))
    slots = blocks * sizes.block
    room = max(cfg.compute.max_tokens_per_micro_batch, context + slots)
    share = room / (context + slots)
    return round(context * share), round(slots * share), slots


def trainer_lines(cfg: Config, sizes: Sizes) -> list[Line]:
    """What one FSDP rank holds while it trains."""
    world, wide, narrow = (
        cfg.trainer.n_student_workers,
        _bytes(cfg.target.dtype),
        _bytes(cfg.compute.param_dtype),
    )
    context, slots, slots_per_sample = micro_batch(cfg, sizes)
    hidden, width, kv = sizes.target_hidden, sizes.width, sizes.kv
    # bytes; norms and rotations keep float32 copies of what they read
    per_slot = (
        (8 * hidden + 6 * width + 5 * kv + 4 * sizes.draft_intermediate) * narrow
        + 24 * hidden
        + 24 * (width + kv)
    )
    per_context = (5 * kv + 2 * width) * narrow + 24 * kv
    layers = 1 if cfg.compute.gradient_checkpointing else sizes.draft_layers
    kept = (slots * per_slot + context * per_context) * layers
    if cfg.compute.gradient_checkpointing:
        kept += slots * hidden * narrow * sizes.draft_layers
    mask = (
        slots * (cfg.data.max_prompt_length + cfg.data.max_response_length + slots_per_sample) * 3
    )
    target = (
        context
        * ((sizes.features + 1) * hidden + 4 * hidden + 3 * sizes.target_intermediate)
        * wide
    )
    head = 4 * cfg.compute.lm_head_chunk_size * sizes.vocab * 4
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    cached = min(
        cfg.compute.feature_cache_mb * 2**20,
        _samples(cfg) * longest * (sizes.features + 1) * hidden * wide,
    )
    return [
        Line("frozen target", sizes.target_params * wide / GB),
        Line(
            "draft: float32 weights, gradients, two moments", sizes.draft_params * 16 / world / GB
        ),
        Line(
            f"draft: gathered weights and gradients in {cfg.compute.param_dtype}",
            sizes.draft_params * 2 * narrow / GB,
        ),
        Line(
            f"draft activations of {slots} slots and {context} context tokens", (kept + mask) / GB
        ),
        Line("target features and activations", target / GB),
        Line(f"LM head, {cfg.compute.lm_head_chunk_size} rows at a time", head / GB),
        *([Line("feature cache", cached / GB)] if cached else []),
    ]


def _samples(cfg: Config) -> int:
    """Responses that a rank may meet: mini-batches deal them out anew."""
    return cfg.data.train_batch_size * (cfg.sft.steps + (cfg.trainer.total_training_steps or 1))


def engine_lines(cfg: Config, sizes: Sizes, device: Device, memory: float | None) -> list[Line]:
    """What one engine holds while it rolls out; on accelerators, what stays on the host while it
    sleeps. memory: of a device, in GB.
    """
    weights = (sizes.target_params * _bytes(cfg.target.dtype) + sizes.draft_params * 2) / GB
    if device.name == "cpu":
        rows = cfg.rollout.max_num_seqs * (cfg.rollout.num_speculative_tokens + 1)
        return [
            Line("engine weights", weights),
            Line(
                "KV cache (rollout.kv_cache_gb)", float(cfg.rollout.kv_cache_gb or 1) * 2**30 / GB
            ),
            Line("engine logits", 3 * rows * sizes.vocab * 4 / GB),
        ]
    share = cfg.rollout.gpu_memory_utilization * (memory or 0.0)
    graphs = 0.0 if cfg.rollout.enforce_eager else GRAPHS
    return [
        Line(
            f"engine (rollout.gpu_memory_utilization={cfg.rollout.gpu_memory_utilization})", share
        ),
        Line("engine runtime and graphs, also while it sleeps", CONTEXT + graphs),
        Line("host copy of the engine's weights while it sleeps (pinned)", host=weights),
    ]


def teacher_lines(
    cfg: Config, device: Device, memory: float | None, parameters: Mapping[str, int]
) -> list[Line]:
    """What the teacher servers hold, each on a device of its own. parameters: by
    name of the model.
    """
    if device.name != "cpu":
        share = cfg.teacher.gpu_memory_utilization * (memory or 0.0)
        what = (
            "a teacher server "
            f"(teacher.gpu_memory_utilization={cfg.teacher.gpu_memory_utilization}), on a device "
            "of its own"
        )
        return [Line(what, share + CONTEXT)] if parameters else []
    fixed = PROCESS["engine"] + PROCESS["server"] + float(cfg.teacher.kv_cache_gb or 1) * 2**30 / GB
    return [
        Line(
            f"teacher {name}, {cfg.teacher.replicas} server(s)",
            cfg.teacher.replicas * (fixed + count * _bytes(cfg.target.dtype) / GB),
        )
        for name, count in parameters.items()
    ]


@dataclass(frozen=True)
class Estimate:
    """GB of one student worker: rolling out, training, on the host; and of everything on this
    machine (CPU).
    """

    rollout: float
    training: float
    host: float
    total: float


def estimate(
    cfg: Config,
    sizes: Sizes,
    device: Device,
    memory: float | None = None,
    teachers: Sequence[Line] = (),
) -> Estimate:
    """Peaks of one student worker. On a CPU trainer and engine are there all the time, and teachers
    beside them; on accelerators the engine sleeps while the trainer works.
    """
    trainer, engine = trainer_lines(cfg, sizes), engine_lines(cfg, sizes, device, memory)
    resident = sum(line.device for line in trainer[:2])  # what a trainer keeps between two updates
    busy, held = sum(line.device for line in trainer), sum(line.device for line in engine)
    if device.name == "cpu":
        one = SLACK * busy + held + PROCESS["trainer"] + PROCESS["engine"] + PROCESS["server"]
        return Estimate(
            one,
            one,
            0.0,
            one * cfg.trainer.n_student_workers
            + PROCESS["run"]
            + sum(line.device for line in teachers),
        )
    host = (
        sum(line.host for line in engine)
        + PROCESS["trainer"]
        + PROCESS["engine"]
        + PROCESS["server"]
    )
    asleep = engine[1].device
    return Estimate(resident + CONTEXT + held, busy + CONTEXT + asleep, host, 0.0)


def report(
    cfg: Config,
    device: Device,
    sizes: Sizes | None,
    parameters: Mapping[str, int],
    why_not: str = "",
) -> None:
    """Print placement, environments and memory. parameters: of the teacher servers' models, by
    name.
    """
    console = Console()
    students, models = cfg.trainer.n_student_workers, teacher_models(cfg)
    unit = "bundle" if device.ray_resource is None else f"{device.ray_resource} bundle"
    rows = [[f"{unit} {i}", f"trainer rank {i}, engine {i}"] for i in range(students)]
    names = [name for name in models for _ in range(cfg.teacher.replicas)]
    rows += [
        [f"teacher {unit} {i}", f"teacher server {i} ({name})"] for i, name in enumerate(names)
    ]
    console.table(f"placement over {cfg.trainer.nnodes} node(s)", ["where", "who"], rows)
    environ = {**os.environ, **cfg.ray.runtime_env.get("env_vars", {})}  # as actors will have it
    variables = [
        [role, *item]
        for role in ("trainer", "engine")
        for item in actor_environment(device, role, environ).items()
    ]
    if variables:
        console.table("environment of the actors", ["role", "variable", "value"], variables)
    if sizes is None:
        console.print(f"memory: not estimated ({why_not})")
        return
    _report_memory(console, cfg, device, sizes, parameters)


def _report_memory(
    console: Console, cfg: Config, device: Device, sizes: Sizes, parameters: Mapping[str, int]
) -> None:
    memory = device_memory(device)
    lines = [("trainer rank", line) for line in trainer_lines(cfg, sizes)]
    lines += [("engine", line) for line in engine_lines(cfg, sizes, device, memory)]
    teachers = teacher_lines(cfg, device, memory, parameters)
    lines += [("teachers", line) for line in teachers]
    rows = [[who, line.what, f"{line.device:.2f}", f"{line.host:.2f}"] for who, line in lines]
    console.table(
        "memory of one student worker, and of teachers, GB",
        ["process", "what", "device" if device.ray_resource else "memory", "host"],
        rows,
    )
    peak = estimate(cfg, sizes, device, memory, teachers)
    if device.name == "cpu":
        console.print(
            f"peak of the run: about {peak.total:.1f} GB, {cfg.trainer.n_student_workers} student "
            f"worker(s) of {peak.training:.1f} GB"
        )
        return
    known = (
        f"of {memory:.0f} GB" if memory else "(no device here: the engine's share is not counted)"
    )
    console.print(
        f"peak of one device {known}: about {peak.rollout:.1f} GB rolling out, {peak.training:.1f} "
        "GB training; "
        f"host: {peak.host:.1f} GB a student worker"
    )
    worst = max(peak.rollout, peak.training)
    if memory and worst > memory:
        console.print(
            "note: that is more than a device has; lower rollout.gpu_memory_utilization, "
            "compute.max_tokens_per_micro_batch or "
            "opd.max_response_anchors, or set compute.gradient_checkpointing=true (is "
            f"{cfg.compute.gradient_checkpointing})"
        )


def device_memory(device: Device) -> float | None:
    """GB of one accelerator of this machine; None on a CPU, or where there is none."""
    if device.ray_resource is None:
        return None
    import torch

    backend = getattr(torch, device.name, None)
    if backend is None or not backend.is_available():
        return None
    return float(backend.mem_get_info()[1]) / GB


def plan(cfg: Config) -> None:
    """What `verl-opd plan` does: configuration, placement, environments, memory. Nothing is
    started, and models need not be within reach.
    """
    from transformers import AutoConfig

    print(to_yaml(cfg))
    device = resolve_device(cfg.trainer.device)
    sizes, why_not, parameters = None, "", dict[str, int]()
    trust = cfg.target.trust_remote_code
    try:
        target = AutoConfig.from_pretrained(cfg.target.path, trust_remote_code=trust)
        if device.name == "npu":
            check_npu(cfg, target.num_hidden_layers, os.environ)
        sizes = sizes_of(cfg, target, draft_config_of(cfg, target, weights=False))
        models = {
            name: AutoConfig.from_pretrained(path, trust_remote_code=trust)
            for name, path in teacher_models(cfg).items()
        }
        parameters = {name: parameter_count(model) for name, model in models.items()}
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError) and not str(error).startswith("draft.path="):
            raise
        why_not = " ".join(str(error).split())[:200]
    report(cfg, device, sizes, parameters, why_not)
