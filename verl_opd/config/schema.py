"""Every configuration key, once: name, type, default, rule (`option`) and meaning.

Recipes and command-line overrides are checked against these dataclasses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from omegaconf import MISSING

from verl_opd.devices import DEVICES
from verl_opd.opd.names import RESPONSE_LOSSES, TEACHER_SOURCES, TOP_K_LOSS
from verl_opd.opd.options import AnchorOptions, LossOptions, option

_DTYPES = ("bfloat16", "float32")


def _folder_name(value: str) -> str:
    if re.fullmatch(r"[\w.+=-]*[\w+=-][\w.+=-]*", value):
        return ""
    return (
        "becomes a folder name: use letters, digits and . _ - + = (trainer.run_dir takes any path)"
    )


def _ascending_layers(value: list[int]) -> str:
    if value and value[0] >= 0 and all(low < high for low, high in pairwise(value)):
        return ""
    return "must be 0-based target layers in ascending order, each once"


def _two_momenta(value: tuple[float, ...]) -> str:
    if len(value) == 2 and all(0 <= beta < 1 for beta in value):
        return ""
    return "must be two numbers in [0, 1)"


def _some_files(value: list[str]) -> str:
    return "" if value else "is empty: name at least one JSONL file"


@dataclass
class TargetConfig:
    """The frozen target LLM."""

    path: str = MISSING  # HF directory (or hub id where a hub is reachable)
    # of the trainer's copy and the engine's; no float16: it would round drafts, which are bfloat16
    dtype: str = option("bfloat16", choices=_DTYPES)
    trust_remote_code: bool = False  # run Python code from the model directory


@dataclass
class DraftConfig:
    """The trainable draft. With `path` its config comes from there; otherwise it is derived from
    the target and the keys below.
    """

    family: str = "dflash"  # dflash | eagle3 | dspark (accelerators only)
    path: str | None = None  # HF-format draft directory to start from; null = random weights
    # null = 2 for dflash, 1 for eagle3 (which has no other)
    num_hidden_layers: int | None = option(None, at_least=1)
    # B: 1 anchor + B-1 proposals; a trained dflash draft may be given shorter blocks;
    # null = that of draft.path, else rollout.num_speculative_tokens + 1
    block_size: int | None = None
    # dflash: a real, unused embedding row; required with random weights
    mask_token_id: int | None = option(None, at_least=0)
    # 0-based target decoder layers whose output feeds the draft; null = evenly spread
    target_layer_ids: list[int] | None = option(None, check=_ascending_layers)
    # dflash: how many layers to spread when target_layer_ids is null; eagle3 reads three
    num_target_features: int = option(5, at_least=1)
    intermediate_size: int | None = option(None, at_least=1)  # null = the target's
    confidence_head: bool = False  # dspark: also learn how likely each proposal is to be accepted
    init_std: float = option(0.02, above=0)  # standard deviation of random weights
    allow_block_size_mismatch: bool = False  # opt in to B != K+1


@dataclass
class DataConfig:
    """Prompts. JSONL rows hold `prompt` (chat messages) and optionally `data_source`."""

    train_files: list[str] = option(MISSING, check=_some_files)  # JSONL files of prompts
    val_files: dict[str, str] = field(default_factory=dict)  # benchmark name -> file
    prompt_key: str = "prompt"  # field of a row that holds its messages
    # prompts per rollout step, over all student workers
    train_batch_size: int = option(16, at_least=1)
    # tokens after the chat template; longer prompts are dropped and counted
    max_prompt_length: int = option(512, at_least=1)
    max_response_length: int = option(512, at_least=1)  # tokens
    # first N training rows over all files, before filters
    max_samples: int | None = option(None, at_least=1)
    val_max_samples: int | None = option(None, at_least=1)  # first N rows of each benchmark
    shuffle: bool = True  # a new order in every epoch; false = the order of the files
    seed: int = option(42, at_least=0)  # of that order
    # arguments of the chat template, such as enable_thinking
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentConfig:
    """Agent loop actors that turn prompts into samples."""

    # null = one per student worker; must divide data.train_batch_size
    num_workers: int | None = option(None, at_least=1)
    loop: str = option("single_turn", choices=("single_turn",))  # how a prompt becomes a sample
    max_concurrency: int = option(256, at_least=1)  # samples in flight per worker


@dataclass
class RolloutConfig:
    """The engine that rolls target and draft out together."""

    num_speculative_tokens: int = option(7, at_least=1)  # K
    temperature: float = option(0.0, at_least=0)  # 0 = greedy
    top_p: float = option(1.0, above=0, at_most=1)  # 1 = off
    top_k: int = option(-1, at_least=1, off=-1)  # -1 = off
    max_num_seqs: int = option(32, at_least=1)  # per replica
    # null = max_prompt_length + max_response_length + 2K, so that no proposal is cut
    max_model_len: int | None = option(None, at_least=1)
    # share of a device's memory that an engine takes
    gpu_memory_utilization: float = option(0.4, above=0, at_most=1)
    enforce_eager: bool = True  # no captured graphs
    kv_cache_gb: int | None = option(None, above=0)  # CPU only: KV cache size per replica
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # any vLLM engine argument
    start_timeout: float = option(600.0, above=0)  # seconds until an engine must be ready
    request_timeout: float = option(1800.0, above=0)  # seconds for one response
    # seconds without progress in any request after which an engine or a teacher server counts as
    # hanging and is replaced
    stall_timeout: float = option(300.0, above=0)
    agent: AgentConfig = field(default_factory=AgentConfig)  # the agent loops


@dataclass
class OpdConfig(LossOptions, AnchorOptions):
    """What is supervised, and how the two loss streams are weighed; most keys are declared in
    verl_opd/opd/options.py.
    """

    # with policy_gradient: "module:function"(prompt_ids, response_ids, data_source) -> float,
    # mixed into the advantage
    reward: str | None = None
    reward_weight: float = 1.0  # of the reward in the advantage
    # compare replayed slots with the engine's proposals every N OPD updates of fresh rollouts;
    # -1 = never
    replay_check_freq: int = option(1, at_least=1, off=-1)
    # share of slots off by more than a near tie that stops the run; null = only report it
    max_replay_mismatch: float | None = option(0.02, at_least=0, at_most=1)
    # the same for slots that differ at all (bf16 engines: about 3% are near ties)
    max_replay_mismatch_raw: float | None = option(0.1, at_least=0, at_most=1)


@dataclass
class TeacherConfig:
    """What scores the committed tokens of on-policy steps: the trainer's own copy of the target, or
    vLLM servers on devices of their own. Rejected tokens keep the log-probs that the target gave
    when it rejected them; supervised steps are always scored in the trainer.
    """

    # auto = composed, unless other models are named or the loss needs a server
    source: str = option("auto", choices=TEACHER_SOURCES)
    # name -> HF directory; empty = the target; one = for every sample
    models: dict[str, str] = field(default_factory=dict)
    key: str = "data_source"  # several models: the field of a data row that names its teacher
    replicas: int = option(1, at_least=1)  # servers per model, a device each
    top_k: int = option(32, at_least=1)  # tokens per position for opd.response_loss=forward_kl_topk
    max_num_seqs: int = option(64, at_least=1)  # per server
    # share of a device's memory that a server takes
    gpu_memory_utilization: float = option(0.5, above=0, at_most=1)
    kv_cache_gb: int | None = option(None, above=0)  # CPU only
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # any vLLM engine argument


@dataclass
class SftConfig:
    """How supervised steps train whole blocks at sampled anchors, on text that the target writes
    during the run or on given conversations.
    """

    steps: int = option(0, at_least=0)  # supervised steps before OPD starts
    # JSONL conversations to learn from; empty = text that the target writes during the run
    files: list[str] = field(default_factory=list)
    messages_key: str = "messages"  # field of a conversation row that holds its messages
    # optimiser steps per supervised step; text of the target is drawn from all rollouts so far
    updates_per_step: int = option(1, at_least=1)
    samples_per_update: int = option(8, at_least=1)  # sequences per optimiser step
    anchors_per_sample: int = option(16, at_least=1)  # blocks per sequence, at random anchors
    # as opd.response_loss, except what needs a teacher server
    loss: str = option(
        "cross_entropy", choices=tuple(name for name in RESPONSE_LOSSES if name != TOP_K_LOSS)
    )
    position_decay: float = option(0.8, above=0, at_most=1)  # weight decay^(offset-1)
    lr: float | None = option(None, above=0)  # null = optim.lr


@dataclass
class OptimConfig:
    """AdamW with a cosine schedule and linear warm-up; one schedule per stage (sft, opd)."""

    lr: float = option(3e-4, above=0)  # highest learning rate
    # last learning rate of the schedule, as a share of lr
    min_lr_ratio: float = option(0.0, at_least=0, at_most=1)
    # share of the schedule in which the rate rises from 0
    lr_warmup_ratio: float = option(0.05, at_least=0, at_most=1)
    betas: tuple[float, float] = option((0.9, 0.95), check=_two_momenta)  # of AdamW
    weight_decay: float = option(0.0, at_least=0)  # of matrices; norms and biases are not decayed
    grad_clip: float = option(1.0, above=0)  # largest norm of the gradient


@dataclass
class ComputeConfig:
    """How a step is executed. None of these keys changes its result beyond rounding."""

    # forward/backward dtype of the draft; master weights and optimiser are float32
    param_dtype: str = option("bfloat16", choices=_DTYPES)
    # padded context tokens + draft slots
    max_tokens_per_micro_batch: int = option(4096, at_least=1)
    lm_head_chunk_size: int = option(512, at_least=1)  # rows
    gradient_checkpointing: bool = False  # recompute the draft's layers in the backward pass
    # implementation in the trainer's copy of the target
    attention: str = option("sdpa", choices=("sdpa", "eager"))
    # MiB per rank that keep target features of sequences that are trained on again
    feature_cache_mb: int = 0
    # CPU threads per rank; null = cores / student workers
    num_threads: int | None = option(None, at_least=1)


@dataclass
class TrainerConfig:
    """The loop: how long, how often, where to."""

    # directory of everything that a run writes; absolute or relative
    run_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    # folder below runs/, and project of wandb
    project_name: str = option("verl-opd", check=_folder_name)
    # folder below the project, and name of the run in wandb
    experiment_name: str = option("default", check=_folder_name)
    # auto = the accelerator of this machine, else cpu
    device: str = option("auto", choices=("auto", *DEVICES))
    n_student_workers: int = option(1, at_least=1)  # FSDP ranks = engine replicas
    nnodes: int = option(1, at_least=1)  # nodes that the student workers are spread over
    # OPD rollout steps; null = total_epochs over the data
    total_training_steps: int | None = option(None, at_least=0)
    # passes over the prompts, without total_training_steps
    total_epochs: int = option(1, at_least=1)
    update_accumulation_steps: int = option(1, at_least=1)  # rollout steps per optimiser step
    # optimiser steps a rollout batch is split into (mini-batches)
    updates_per_step: int = option(1, at_least=1)
    # passes over each rollout batch; later ones learn from the states of slightly older drafts
    update_epochs: int = option(1, at_least=1)
    # validate every N OPD steps; -1 = only before training and after each stage
    test_freq: int = option(-1, at_least=1, off=-1)
    val_before_train: bool = True  # measure the benchmarks before the first step
    # checkpoint every N steps; -1 = only after the sft stage, validations and at the end
    save_freq: int = option(50, at_least=1, off=-1)
    keep_last: int = option(2, at_least=1)  # newest checkpoints that are kept, besides the best
    # processes that may be replaced because they died or hang: engines, teacher servers and agent
    # loops in place, trainer ranks from the last checkpoint
    max_restarts: int = option(3, at_least=0)
    # auto = from the newest checkpoint of this run, where there is one
    resume_mode: str = option("auto", choices=("auto", "disable", "path"))
    resume_from_path: str | None = None  # checkpoint directory for resume_mode=path
    # where metrics go; metrics.jsonl is always written
    logger: list[str] = option(
        factory=lambda: ["console", "jsonl", "tensorboard"],
        choices=("console", "jsonl", "tensorboard", "wandb"),
    )
    seed: int = option(42, at_least=0)  # of random weights, sampling and anchors


@dataclass
class RayConfig:
    """How the driver reaches Ray. RAY_ADDRESS in the environment joins that cluster; otherwise a
    local one is started.
    """

    address: str | None = None  # cluster to join; null = RAY_ADDRESS, else a local one
    # of a local cluster; null = the cores of this machine
    num_cpus: int | None = option(None, at_least=1)
    # as in ray.init, such as env_vars for all actors
    runtime_env: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    """Root of the configuration tree."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
