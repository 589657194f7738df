"""Every configuration key, defined once. Recipes and command-line overrides are checked against
these dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class TargetConfig:
    """The frozen target LLM."""

    path: str = MISSING  # HF directory (or hub id where a hub is reachable)
    # bfloat16 | float32, for the trainer's copy and the engine's (drafts travel in bf16, which
    # float16 would round)
    dtype: str = "bfloat16"
    trust_remote_code: bool = False


@dataclass
class DraftConfig:
    """The trainable draft. With `path` its config comes from there; otherwise it is derived from
    the target and the keys below.
    """

    family: str = "dflash"  # dflash | eagle3 | dspark (accelerators only)
    path: str | None = None  # HF-format draft directory to start from; null = random initialisation
    num_hidden_layers: int | None = None  # null = 2 for dflash, 1 for eagle3 (which has no other)
    # B: 1 anchor + B-1 proposals; null = that of draft.path, else rollout.num_speculative_tokens +
    # 1. A trained dflash draft may be given shorter blocks
    block_size: int | None = None
    # dflash: a real, unused embedding row; required with random initialisation
    mask_token_id: int | None = None
    # 0-based target decoder layers whose output feeds the draft; null = evenly spread
    target_layer_ids: list[int] | None = None
    # dflash: how many layers to spread when target_layer_ids is null; eagle3 reads three
    num_target_features: int = 5
    intermediate_size: int | None = None  # null = the target's
    confidence_head: bool = False  # dspark: also learn how likely each proposal is to be accepted
    init_std: float = 0.02
    allow_block_size_mismatch: bool = False  # opt in to B != K+1


@dataclass
class DataConfig:
    """Prompts. JSONL rows hold `prompt` (chat messages) and optionally `data_source`."""

    train_files: list[str] = MISSING
    val_files: dict[str, str] = field(default_factory=dict)  # benchmark name -> file
    prompt_key: str = "prompt"
    train_batch_size: int = 16  # prompts per rollout step, over all student workers
    # tokens after the chat template; longer prompts are dropped and counted
    max_prompt_length: int = 512
    max_response_length: int = 512
    max_samples: int | None = None  # first N training rows over all files, before filters
    val_max_samples: int | None = None  # first N rows of each benchmark
    shuffle: bool = True
    seed: int = 42
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentConfig:
    """Agent loop actors that turn prompts into samples."""

    # null = one per student worker; must divide data.train_batch_size
    num_workers: int | None = None
    loop: str = "single_turn"
    max_concurrency: int = 256  # samples in flight per worker


@dataclass
class RolloutConfig:
    """The engine that rolls target and draft out together."""

    num_speculative_tokens: int = 7  # K
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    max_num_seqs: int = 32  # per replica
    # null = max_prompt_length + max_response_length + 2K, so that no proposal is cut
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = True
    kv_cache_gb: int | None = None  # CPU only: KV cache size per replica
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # any vLLM engine argument
    start_timeout: float = 600.0  # seconds for an engine to come up
    request_timeout: float = 1800.0  # seconds for one response
    # seconds without a token for anybody after which an engine counts as hanging and is replaced
    stall_timeout: float = 300.0
    agent: AgentConfig = field(default_factory=AgentConfig)


@dataclass
class OpdConfig:
    """What is supervised, and how the two loss streams are weighed."""

    convention: str = "exact"  # exact | draft_opd
    response_span: str = "segment"  # segment | block: how far after an anchor labels reach
    # forward_kl, k2, k3, abs: on the one committed token; forward_kl_topk: on the likeliest tokens
    # of a teacher server cross_entropy: needs no teacher; full_forward_kl, tv, lk_alpha, lk_lambda:
    # full vocabulary e2e_tv: total variation of whole blocks, refused proposals included (needs
    # rejected_stream_weight 0)
    response_loss: str = "forward_kl"
    rejected_loss: str = "k3"  # k2, k3, abs, forward_kl: on the refused token
    # values of response_loss (k1, k2, k3, abs) become advantages of a PPO-clipped policy gradient
    # on the committed tokens
    policy_gradient: bool = False
    clip_ratio: float = 0.2
    reward: str | None = (
        # with policy_gradient: "module:function"(prompt_ids, response_ids, data_source) -> float,
        # mixed into the advantage
        None
    )
    reward_weight: float = 1.0
    response_stream_weight: float = 1.0
    rejected_stream_weight: float = 1.0
    confidence_weight: float = 1.0  # of the confidence stream, for drafts with such a head
    rejected_position_decay: float = 0.8  # gamma, weight gamma^(offset-1); 1 = off
    response_position_decay: float = 1.0
    loss_max_clamp: float | None = 10.0
    log_prob_min_clamp: float | None = -10.0
    response_anchor_stride: int = 1  # keep every s-th response anchor, and the last
    max_response_anchors: int = 0  # per sample, evenly spread, the last kept; 0 = unlimited
    # ablation: response segments at random places of the response, rejections where they were
    random_anchors: bool = False
    # of a block's refused proposals only the first; switches the position decay off
    rejected_first_only: bool = False
    max_rejected_tokens: int = 0  # refused proposals per sample; 0 = all
    # compare replayed slots with the engine's proposals every N OPD updates of fresh rollouts; -1 =
    # never
    replay_check_freq: int = 1
    # share of slots off by more than a near tie that stops the run; null = only report it
    max_replay_mismatch: float | None = 0.02
    # the same for slots that differ at all (bf16 engines: about 3% are near ties)
    max_replay_mismatch_raw: float | None = 0.1


@dataclass
class TeacherConfig:
    """Who scores the committed tokens of on-policy steps: the trainer's own copy of the target, or
    vLLM servers on devices of their own. Refused tokens keep the log-probs that the target gave
    while it refused them; warm-up is always scored in the trainer.
    """

    # auto | composed | server: auto = composed, unless other models are named or the loss needs a
    # server
    source: str = "auto"
    models: dict[str, str] = field(
        default_factory=dict
    )  # name -> HF directory; empty = the target; one = for every sample
    key: str = "data_source"  # several models: the field of a data row that names its teacher
    replicas: int = 1  # servers per model, a device each
    top_k: int = 32  # tokens per position for opd.response_loss=forward_kl_topk
    max_num_seqs: int = 64  # per server
    gpu_memory_utilization: float = 0.5
    kv_cache_gb: int | None = None  # CPU only
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # any vLLM engine argument


@dataclass
class SftConfig:
    """How warm-up steps (sft.steps) supervise whole blocks at sampled anchors, on fresh
    target text or on given conversations.
    """

    steps: int = 0  # rollout steps of whole-block warm-up before OPD starts
    files: list[str] = field(
        default_factory=list
    )  # JSONL conversations to learn from; empty = text that the target writes meanwhile
    messages_key: str = "messages"
    # optimiser steps of a warm-up step; fresh text: drawn from all that was rolled out so far
    updates_per_step: int = 1
    samples_per_update: int = 8
    anchors_per_sample: int = 16
    loss: str = "cross_entropy"  # as opd.response_loss
    position_decay: float = 0.8  # weight decay^(offset-1)
    lr: float | None = None  # null = optim.lr


@dataclass
class OptimConfig:
    """AdamW with a cosine schedule and linear warm-up; one schedule per phase (warm-up, OPD)."""

    lr: float = 3e-4
    min_lr_ratio: float = 0.0
    lr_warmup_ratio: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass
class ComputeConfig:
    """How a step is executed. None of these keys changes its result beyond rounding."""

    # forward/backward dtype of the draft; master weights and optimiser are float32
    param_dtype: str = "bfloat16"
    max_tokens_per_micro_batch: int = 4096  # padded context tokens + draft slots
    lm_head_chunk_size: int = 512  # rows
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    # per rank: keeps target features of sequences that are trained on again
    feature_cache_mb: int = 0
    num_threads: int | None = None  # CPU threads per rank; null = cores / student workers


@dataclass
class TrainerConfig:
    """The loop: how long, how often, where to."""

    run_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    project_name: str = "verl-opd"
    experiment_name: str = "default"
    device: str = "auto"  # auto | cpu | cuda | npu
    n_student_workers: int = 1  # FSDP ranks = engine replicas
    nnodes: int = 1
    total_training_steps: int | None = None  # OPD rollout steps; null = total_epochs over the data
    total_epochs: int = 1
    update_accumulation_steps: int = 1  # rollout steps per optimiser step
    updates_per_step: int = 1  # optimiser steps a rollout batch is split into (mini-batches)
    # passes over each rollout batch; the second and later ones learn from slightly older drafts'
    # states
    update_epochs: int = 1
    test_freq: int = -1  # validate every N OPD steps; -1 = only before / after warm-up / after OPD
    val_before_train: bool = True
    # checkpoint every N steps; -1 = only after warm-up, validations and at the end
    save_freq: int = 50
    keep_last: int = 2
    # lost processes that are started again: engines and agent loops in place, trainer ranks from
    # the last checkpoint
    max_restarts: int = 3
    resume_mode: str = "auto"  # auto | disable | path
    resume_from_path: str | None = None
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    seed: int = 42


@dataclass
class RayConfig:
    """How the driver reaches Ray. RAY_ADDRESS in the environment joins that cluster; otherwise a
    local one is started.
    """

    address: str | None = None
    num_cpus: int | None = None
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
