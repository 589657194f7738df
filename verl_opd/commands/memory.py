"""How much memory a run takes on devices and on the host, before anything starts.

This is arithmetic over shapes plus constants that were measured on a CPU (what a process holds
before it holds a model). Activations are counted for the worst case: a full micro-batch of the
longest samples. On accelerators an engine takes the share that gpu_memory_utilization sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.devices import Device

GB = 1e9
# GB of a process before it holds a model, measured on a CPU with models of a few kilobytes;
# proportional set size, so that what processes share is counted once
PROCESS = {"trainer": 0.36, "engine": 0.92, "server": 0.5, "run": 1.15}
SLACK = 1.3  # factor: what the C library's allocator keeps of a trainer's temporaries
CONTEXT = 1.0  # GB of an accelerator per process: runtime, workspaces, communicators
GRAPHS = 1.5  # GB of captured graphs, outside of the engine's own share


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of target and draft."""

    target_params: int  # parameters, tied ones once
    target_hidden: int  # numbers of a hidden state, also of the draft's
    target_intermediate: int  # rows of an MLP layer
    vocab: int  # tokens
    features: int  # target layers that the draft reads
    draft_params: int  # parameters
    draft_layers: int  # decoder layers
    draft_intermediate: int  # rows of an MLP layer
    width: int  # query heads x head size, of the draft
    kv: int  # key heads x head size, of the draft
    block: int  # slots of a draft block


@dataclass(frozen=True)
class Line:
    """One part of an estimate."""

    what: str  # as printed
    device: float = 0.0  # GB of device memory
    host: float = 0.0  # GB of host memory
    lasting: bool = False  # also held while the other of the two (trainer, engine) works


@dataclass(frozen=True)
class Micro:
    """The largest micro-batch: as many of the longest samples as fit, at least one."""

    context: int  # tokens of all samples
    slots: int  # draft slots of all samples
    slots_per_sample: int  # draft slots of one of the longest samples


@dataclass(frozen=True)
class Estimate:
    """Peaks of one student worker, and of everything on this machine."""

    rollout: float  # GB of its device while the engine works
    training: float  # GB of its device while the trainer works
    host: float  # GB of host memory beside an accelerator
    total: float  # GB of all processes of the run; on a CPU only


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
    """Parameters of a model, tied ones once; counted on a model without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def micro_batch(cfg: Config, sizes: Sizes) -> Micro:
    """What one pass of the trainer holds at most."""
    longest, opd = _longest(cfg), cfg.opd
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
    room = max(cfg.compute.max_tokens_per_micro_batch, longest + slots)
    samples = room / (longest + slots)
    return Micro(round(longest * samples), round(slots * samples), slots)


def trainer_lines(cfg: Config, sizes: Sizes) -> list[Line]:
    """What one FSDP rank holds while it trains."""
    compute, ranks = cfg.compute, cfg.trainer.n_student_workers
    wide, narrow = _bytes(cfg.target.dtype), _bytes(compute.param_dtype)
    micro, hidden = micro_batch(cfg, sizes), sizes.target_hidden
    feature_row = (sizes.features + 1) * hidden  # numbers of one context token
    target = micro.context * (feature_row + 4 * hidden + 3 * sizes.target_intermediate) * wide
    head = 4 * compute.lm_head_chunk_size * sizes.vocab * 4
    cached = min(
        compute.feature_cache_mb * 2**20,
        _responses(cfg) * _longest(cfg) * feature_row * wide,
    )
    lines = [
        Line("frozen target", sizes.target_params * wide / GB, lasting=True),
        Line(
            "draft: float32 weights, gradients, two moments",
            sizes.draft_params * 16 / ranks / GB,
            lasting=True,
        ),
        Line(
            f"draft: gathered weights and gradients in {compute.param_dtype}",
            sizes.draft_params * 2 * narrow / GB,
        ),
        Line(
            f"draft activations of {micro.slots} slots and {micro.context} context tokens",
            _draft_activations(cfg, sizes, micro) / GB,
        ),
        Line("target features and activations", target / GB),
        Line(f"LM head, {compute.lm_head_chunk_size} rows at a time", head / GB),
    ]
    return [*lines, Line("feature cache", cached / GB)] if cached else lines


def _draft_activations(cfg: Config, sizes: Sizes, micro: Micro) -> int:
    """Bytes that the draft keeps for its backward pass, attention mask included."""
    narrow, hidden = _bytes(cfg.compute.param_dtype), sizes.target_hidden
    width, kv = sizes.width, sizes.kv
    # norms and rotations keep float32 copies of what they read: the terms with 24
    per_slot = (
        (8 * hidden + 6 * width + 5 * kv + 4 * sizes.draft_intermediate) * narrow
        + 24 * hidden
        + 24 * (width + kv)
    )
    per_context = (5 * kv + 2 * width) * narrow + 24 * kv
    layer = micro.slots * per_slot + micro.context * per_context
    mask = micro.slots * (_longest(cfg) + micro.slots_per_sample) * 3
    if cfg.compute.gradient_checkpointing:  # one layer at a time, and the input of each
        return layer + micro.slots * hidden * narrow * sizes.draft_layers + mask
    return layer * sizes.draft_layers + mask


def _longest(cfg: Config) -> int:
    """Tokens of the longest sample."""
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def _responses(cfg: Config) -> int:
    """Responses that a rank may train on: every mini-batch is distributed over all ranks again."""
    return cfg.data.train_batch_size * (cfg.sft.steps + (cfg.trainer.total_training_steps or 1))


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def engine_lines(cfg: Config, sizes: Sizes, device: Device, memory: float | None) -> list[Line]:
    """What one engine holds while it rolls out; on accelerators also what stays on the host while
    it sleeps. `memory`: GB of a device.
    """
    rollout = cfg.rollout
    weights = (sizes.target_params * _bytes(cfg.target.dtype) + sizes.draft_params * 2) / GB
    if device.on_host:
        rows = rollout.max_num_seqs * (rollout.num_speculative_tokens + 1)
        return [
            Line("engine weights", weights),
            Line("KV cache (rollout.kv_cache_gb)", float(rollout.kv_cache_gb or 1) * 2**30 / GB),
            Line("engine logits", 3 * rows * sizes.vocab * 4 / GB),
        ]
    share = rollout.gpu_memory_utilization
    graphs = 0.0 if rollout.enforce_eager else GRAPHS
    return [
        Line(f"engine (rollout.gpu_memory_utilization={share})", share * (memory or 0.0)),
        Line("engine runtime and graphs, also while it sleeps", CONTEXT + graphs, lasting=True),
        Line("host copy of the engine's weights while it sleeps (pinned)", host=weights),
    ]


def teacher_lines(
    cfg: Config, device: Device, memory: float | None, parameters: Mapping[str, int]
) -> list[Line]:
    """What the teacher servers hold, each on a device of its own. `memory`: GB of a device.
    `parameters`: of each model, by its name.
    """
    teacher = cfg.teacher
    if not device.on_host:
        share = teacher.gpu_memory_utilization
        what = f"a teacher server (teacher.gpu_memory_utilization={share}), on a device of its own"
        return [Line(what, share * (memory or 0.0) + CONTEXT)] if parameters else []
    fixed = PROCESS["engine"] + PROCESS["server"] + float(teacher.kv_cache_gb or 1) * 2**30 / GB
    return [
        Line(
            f"teacher {name}, {teacher.replicas} server(s)",
            teacher.replicas * (fixed + count * _bytes(cfg.target.dtype) / GB),
        )
        for name, count in parameters.items()
    ]


def estimate(
    cfg: Config,
    sizes: Sizes,
    device: Device,
    memory: float | None = None,
    teachers: Sequence[Line] = (),
) -> Estimate:
    """Peaks of one student worker. On a CPU trainer and engine hold their memory all the time, and
    teachers beside them; on accelerators the engine sleeps while the trainer works.
    """
    trainer, engine = trainer_lines(cfg, sizes), engine_lines(cfg, sizes, device, memory)
    processes = PROCESS["trainer"] + PROCESS["engine"] + PROCESS["server"]
    if device.on_host:
        one = SLACK * _on_device(trainer) + _on_device(engine) + processes
        everything = one * cfg.trainer.n_student_workers + PROCESS["run"] + _on_device(teachers)
        return Estimate(one, one, 0.0, everything)
    return Estimate(
        _on_device(_lasting(trainer)) + CONTEXT + _on_device(engine),
        _on_device(trainer) + CONTEXT + _on_device(_lasting(engine)),
        sum(line.host for line in engine) + processes,
        0.0,
    )


def _on_device(lines: Iterable[Line]) -> float:
    return sum(line.device for line in lines)


def _lasting(lines: Iterable[Line]) -> Iterable[Line]:
    return (line for line in lines if line.lasting)


def device_memory(device: Device) -> float | None:
    """GB of one accelerator of this machine; None on a CPU, or where there is none."""
    if device.on_host:
        return None
    import torch

    backend = getattr(torch, device.name, None)
    if backend is None or not backend.is_available():
        return None
    return float(backend.mem_get_info()[1]) / GB
