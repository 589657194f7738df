"""The alias table: names of verl and Draft-OPD, and former names of this package, in our keys.

Only override lines are translated (translate.py). Of these names, recipes may use only the former
ones of this package (config/source.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_opd.compat import values
from verl_opd.compat.values import Given
from verl_opd.config.keys import keys_of


@dataclass(frozen=True)
class To:
    """Another name for one of our keys."""

    new: str  # our key; its `*` is what the `*` of the old key matched
    # old value -> new text. A function returns None to keep the text and raises ValueError with
    # what the value must be. A dict lists all supported values. None keeps every text.
    value: Callable[[Any], str | None] | dict[str, str] | None = None
    note: str = ""  # what the table of docs/aliases.md adds


@dataclass(frozen=True)
class Drop:
    """Accepted without effect, because this package always works that way."""

    why: str  # how this package works
    only: tuple[Any, ...] = ()  # accepted values, all others are unsupported; empty = every value


@dataclass(frozen=True)
class Unsupported:
    """Has no counterpart here."""

    why: str  # what to do instead, or why there is none


@dataclass(frozen=True)
class With:
    """Decides our keys together with other lines."""

    news: tuple[str, ...]  # our keys
    resolve: Callable[[Given], dict[str, str]]  # every line given -> our keys with their texts
    note: str  # what the table of docs/aliases.md adds


AliasRow = To | Drop | Unsupported | With

_OF_LOSS = With(
    ("opd.response_loss", "opd.rejected_loss"),
    values.losses,
    "weights 1 and 0: the estimator; 0 and 1: forward_kl; mixtures are unsupported",
)
_OF_FAMILY = With(
    ("draft.family",),
    values.family,
    "a composed DFlash student is dspark where another line names it",
)
_OF_TEACHERS = With(
    ("teacher.replicas",), values.teachers, "devices of the pool, shared equally by the teachers"
)
_HOW_A_STEP_RUNS = "changes how a step runs, not its result; see the compute section"
_SEEDED = "drawn from trainer.seed"
_SGLANG = "settings of SGLang; the engine is vLLM, whose settings are rollout.engine_kwargs"
_ONE_DEVICE = "every server runs on one device"
_NO_REWARDS = (
    "no advantages, critics or reward models: the losses are in the opd section, a reward function "
    "is opd.reward"
)
_OFFLOAD = "nothing is offloaded: only the draft is trained"

SECTIONS: dict[str, dict[str, AliasRow]] = {
    "data": {
        "train_files": To("data.train_files", values.files, "a list inside a string is read"),
        "val_files": To(
            "data.val_files", values.benchmarks, "a list becomes name: file, named after the files"
        ),
        "train_max_samples": To("data.max_samples", values.or_all, "-1: all"),
        "val_max_samples": To("data.val_max_samples", values.or_all, "-1: all"),
        "trust_remote_code": To("target.trust_remote_code"),
        "filter_overlong_prompts": Drop("longer prompts are dropped and counted", (True,)),
        "filter_overlong_prompts_workers": Drop("prompts are filtered in the driver"),
        "truncation": Drop("prompts are never cut", ("error",)),
        "return_raw_chat": Drop("agent loops read token ids"),
        "validation_shuffle": Drop("held-out prompts keep their order", (False,)),
        "val_batch_size": Drop("held-out prompts are all sent at once"),
        "dataloader_num_workers": Drop("prompts are read once, before the run"),
        "reward_fn_key": Drop("teacher.key distinguishes rows"),
        "custom_cls.*": Unsupported("prompts are JSONL rows, as README.md describes"),
    },
    "actor_rollout_ref": {
        "hybrid_engine": Drop("engines and trainer share their devices", (True,)),
        "nccl_timeout": Drop(
            "waiting is bounded by rollout.request_timeout and rollout.stall_timeout"
        ),
        "ref.*": Drop("no reference model"),
    },
    "actor_rollout_ref.model": {
        "path": To("target.path"),
        "trust_remote_code": To("target.trust_remote_code"),
        "enable_gradient_checkpointing": To("compute.gradient_checkpointing", values.flag),
        "enable_activation_offload": Drop(_OFFLOAD, (False,)),
        "use_remove_padding": Drop(_HOW_A_STEP_RUNS),
        "use_fused_kernels": Drop(_HOW_A_STEP_RUNS),
        "use_shm": Drop("models are read from their own directory"),
        "lora_rank": Drop("all of the draft is trained", (0,)),
        "external_lib": Unsupported("draft families are folders of verl_opd/drafts"),
        "tokenizer_path": Unsupported("the tokenizer is the target's"),
    },
    "actor_rollout_ref.model.override_config": {
        "verl_composed_dflash_student": _OF_FAMILY,
        "verl_composed_eagle3_student": _OF_FAMILY,
        "verl_dflash_draft_variant": _OF_FAMILY,
        "verl_dflash_main_model_path": To("target.path"),
        "verl_eagle3_main_model_path": To("target.path"),
        "verl_dflash_draft_model_path": To("draft.path"),
        "verl_eagle3_draft_model_path": To("draft.path"),
        "verl_dflash_attention_impl": To(
            "compute.attention", values.ATTENTION, "flex_attention: sdpa"
        ),
        "verl_dflash_lm_head_chunk_size": To("compute.lm_head_chunk_size"),
        "verl_eagle3_lm_head_chunk_size": To("compute.lm_head_chunk_size"),
        "verl_dflash_response_anchor_stride": To("opd.response_anchor_stride"),
        "verl_eagle3_response_anchor_stride": To("opd.response_anchor_stride"),
        "verl_dflash_max_response_anchors": To("opd.max_response_anchors"),
        "verl_dflash_rejected_draft_max_tokens_per_sample": To(
            "opd.max_rejected_tokens", values.or_zero, "null: 0, which is all"
        ),
        "verl_dflash_random_response_anchor_enabled": To("opd.random_anchors", values.flag),
        "verl_eagle3_random_response_anchor_enabled": To("opd.random_anchors", values.flag),
        "verl_dflash_random_response_anchor_seed": Drop(_SEEDED),
        "verl_eagle3_random_response_anchor_seed": Drop(_SEEDED),
        "verl_eagle3_replay_block_size": To(
            "rollout.num_speculative_tokens", values.one_less, "one less: the anchor counts"
        ),
        "verl_eagle3_ttt_length": To(
            "rollout.num_speculative_tokens", note="a block is as long as what is drafted"
        ),
        "verl_eagle3_ttt_step_weight": Drop(
            "has no effect on blocks at anchors; opd.response_position_decay weighs their slots"
        ),
        "verl_eagle3_response_stream_impl": Drop(
            "blocks start where the engine's did; opd.response_span=block labels each to its end",
            ("anchor_block",),
        ),
        "verl_eagle3_response_loss_mode": With(
            ("opd.response_loss",), values.losses, "native_target_distribution: full_forward_kl"
        ),
    },
    "actor_rollout_ref.actor": {
        "strategy": Drop("the draft is sharded with FSDP2", ("fsdp2", "fsdp")),
        "ppo_mini_batch_size": With(
            ("trainer.updates_per_step",),
            values.updates_per_step,
            "data.train_batch_size divided by it",
        ),
        "ppo_epochs": To("trainer.update_epochs"),
        "ppo_max_token_len_per_gpu": To(
            "compute.max_tokens_per_micro_batch", note="the slots of the draft count too"
        ),
        "ppo_micro_batch_size_per_gpu": Drop(
            "micro-batches are filled by tokens: compute.max_tokens_per_micro_batch"
        ),
        "ppo_micro_batch_size": Drop(
            "micro-batches are filled by tokens: compute.max_tokens_per_micro_batch"
        ),
        "use_dynamic_bsz": Drop("micro-batches are filled by tokens, with the same result"),
        "use_torch_compile": Drop(_HOW_A_STEP_RUNS),
        "data_loader_seed": To("trainer.seed"),
        "grad_clip": To("optim.grad_clip"),
        "entropy_coeff": Drop("no entropy bonus", (0,)),
        "entropy_checkpointing": Drop("no entropy bonus"),
        "entropy_from_logits_with_chunking": Drop("no entropy bonus"),
        "use_kl_loss": Drop("no reference model", (False,)),
        "kl_loss_coef": Drop("no reference model"),
        "kl_loss_type": Drop("no reference model"),
        "loss_agg_mode": Drop("losses are averaged over supervised tokens", ("token-mean",)),
        "ulysses_sequence_parallel_size": Drop("sequences are not split", (1,)),
        "checkpoint.*": Drop("a checkpoint holds draft, optimiser, RNG and data position"),
        "optim.lr": To("optim.lr"),
        "optim.lr_warmup_steps_ratio": To("optim.lr_warmup_ratio"),
        "optim.min_lr_ratio": To("optim.min_lr_ratio"),
        "optim.betas": To("optim.betas"),
        "optim.weight_decay": To("optim.weight_decay"),
        "optim.clip_grad": To("optim.grad_clip"),
        "optim.lr_scheduler_type": Drop("cosine with linear warm-up", ("cosine",)),
        "optim.warmup_style": Drop("cosine with linear warm-up", ("cosine",)),
        "optim.num_cycles": Drop("half a cosine", (0.5, None)),
        "optim.lr_warmup_steps": Drop(
            "warm-up is a share of all steps: optim.lr_warmup_ratio", (-1, None)
        ),
        "optim.total_training_steps": Drop("follows from the length of the run", (-1, None)),
        "optim.optimizer": Drop("AdamW", ("AdamW",)),
        "fsdp_config.seed": To("trainer.seed"),
        "fsdp_config.dtype": To("compute.param_dtype", values.DTYPES),
        "fsdp_config.mixed_precision.param_dtype": To("compute.param_dtype", values.DTYPES),
        "fsdp_config.model_dtype": Drop(
            "master weights are float32; compute.param_dtype is what a step computes in",
            ("fp32", "float32"),
        ),
        "fsdp_config.param_offload": Drop(_OFFLOAD, (False,)),
        "fsdp_config.optimizer_offload": Drop(_OFFLOAD, (False,)),
        "fsdp_config.offload_policy": Drop(_OFFLOAD, (False,)),
        "fsdp_config.fsdp_size": Drop("shards over all student workers", (-1,)),
        "fsdp_config.reshard_after_forward": Drop(_HOW_A_STEP_RUNS),
        "fsdp_config.forward_prefetch": Drop(_HOW_A_STEP_RUNS),
        "fsdp_config.ulysses_sequence_parallel_size": Drop("sequences are not split", (1,)),
    },
    "actor_rollout_ref.rollout": {
        "name": Drop("the engine is vLLM", ("vllm",)),
        "mode": Drop("requests are asynchronous", ("async",)),
        "n": Drop(
            "a prompt is rolled out once per step; trainer.update_epochs and trainer.total_epochs "
            "use it more often",
            (1,),
        ),
        "tensor_model_parallel_size": Drop(_ONE_DEVICE, (1,)),
        "data_parallel_size": Drop(_ONE_DEVICE, (1,)),
        "expert_parallel_size": Drop(_ONE_DEVICE, (1,)),
        "pipeline_model_parallel_size": Drop(_ONE_DEVICE, (1,)),
        "n_gpus_per_node": Drop("engines run on the devices of the student workers"),
        "nnodes": Drop("engines run on the devices of the student workers"),
        "load_format": Drop(
            "the target is read from its files: no sync replaces its weights",
            ("auto", "safetensors"),
        ),
        "dtype": To("target.dtype", values.DTYPES),
        "temperature": To("rollout.temperature"),
        "top_p": To("rollout.top_p"),
        "top_k": To("rollout.top_k"),
        "do_sample": Drop("rollout.temperature decides: 0 is greedy"),
        "ignore_eos": Drop("a response ends at its stop token", (False,)),
        "prompt_length": To("data.max_prompt_length"),
        "response_length": To("data.max_response_length"),
        "gpu_memory_utilization": To("rollout.gpu_memory_utilization"),
        "max_num_seqs": To("rollout.max_num_seqs"),
        "max_model_len": With(
            ("rollout.max_model_len",),
            values.model_length,
            "null up to prompt + response + 1, which would cut the last proposals",
        ),
        "max_num_batched_tokens": To("rollout.engine_kwargs.max_num_batched_tokens"),
        "cudagraph_capture_sizes": To(
            "rollout.engine_kwargs.compilation_config.cudagraph_capture_sizes"
        ),
        "enable_chunked_prefill": To("rollout.engine_kwargs.enable_chunked_prefill"),
        "enable_prefix_caching": To("rollout.engine_kwargs.enable_prefix_caching"),
        "enforce_eager": To("rollout.enforce_eager"),
        "free_cache_engine": Drop("engines sleep while the draft is trained", (True,)),
        "calculate_log_probs": Drop(
            "a rollout records the target's log-probs of rejected tokens, nothing else", (False,)
        ),
        "log_prob_*": Drop("old log-probs are not computed"),
        "disable_log_stats": Drop("metrics come from the engine's statistics"),
        "skip_tokenizer_init": Drop("engines take token ids and return text too"),
        "layered_summon": Drop("only the draft is pushed"),
        "val_kwargs.do_sample": Drop("validation is greedy", (False,)),
        "val_kwargs.temperature": Drop("validation is greedy", (0,)),
        "val_kwargs.top_k": Drop("validation is greedy"),
        "val_kwargs.top_p": Drop("validation is greedy"),
        "val_kwargs.n": Drop("a held-out prompt is answered once", (1,)),
        "multi_turn.enable": Drop("one turn per prompt: rollout.agent.loop", (False,)),
        "agent.num_workers": To("rollout.agent.num_workers"),
        "agent.default_agent_loop": To("rollout.agent.loop", {"single_turn_agent": "single_turn"}),
        "agent.agent_loop_config_path": Drop(
            "agent loops are registered in rollout/agent_loop.py", (None,)
        ),
        "mtp._target_": Drop("one typed schema"),
        "mtp.enable": Drop("target and draft always roll out together", (True,)),
        "mtp.enable_rollout": Drop("target and draft always roll out together", (True,)),
        "mtp.method": _OF_FAMILY,
        "mtp.num_speculative_tokens": To("rollout.num_speculative_tokens"),
        "mtp.draft_model_path": To("draft.path", values.a_path),
        "engine_kwargs.vllm": To("rollout.engine_kwargs"),
        "engine_kwargs.vllm.*": To("rollout.engine_kwargs.*", note="JSON stays one string"),
        "engine_kwargs.sglang": Drop(_SGLANG),
        "engine_kwargs.sglang.*": Drop(_SGLANG),
    },
    "distillation": {
        "enabled": Drop("distillation is the only mode", (True,)),
        "teacher_logprob_source": To("teacher.source", values.SOURCES, "composed_main: composed"),
        "teacher_key": To("teacher.key"),
        "n_gpus_per_node": _OF_TEACHERS,
        "nnodes": _OF_TEACHERS,
        "teacher_models.*.num_replicas": _OF_TEACHERS,
        "teacher_models.*.model_path": With(
            ("teacher.models",),
            values.teachers,
            "named default, or by `key` when there are several",
        ),
        "teacher_models.*.key": With(
            ("teacher.models",), values.teachers, "names a teacher when there are several"
        ),
        "teacher_models.*.inference.name": Drop("teacher servers are vLLM", ("vllm",)),
        "teacher_models.*.inference.temperature": Drop("teachers score at temperature 1", (1,)),
        "teacher_models.*.inference.dtype": Drop("target.dtype", ("bfloat16", "auto")),
        "teacher_models.*.inference.gpu_memory_utilization": To("teacher.gpu_memory_utilization"),
        "teacher_models.*.inference.max_num_seqs": To("teacher.max_num_seqs"),
        "teacher_models.*.inference.max_num_batched_tokens": To(
            "teacher.engine_kwargs.max_num_batched_tokens"
        ),
        "teacher_models.*.inference.enable_chunked_prefill": To(
            "teacher.engine_kwargs.enable_chunked_prefill"
        ),
        "teacher_models.*.inference.enable_prefix_caching": To(
            "teacher.engine_kwargs.enable_prefix_caching"
        ),
        "teacher_models.*.inference.engine_kwargs.vllm.*": To("teacher.engine_kwargs.*"),
        "teacher_models.*.inference.engine_kwargs.sglang.*": Drop(_SGLANG),
        "teacher_models.*.inference.enforce_eager": Drop("rollout.enforce_eager decides"),
        "teacher_models.*.inference.max_model_len": Drop("prompt + response + 1"),
        "teacher_models.*.inference.prompt_length": Drop(
            "prompt + response is scored in one piece"
        ),
        "teacher_models.*.inference.response_length": Drop(
            "prompt + response is scored in one piece"
        ),
        "teacher_models.*.inference.free_cache_engine": Drop(
            "teacher servers have devices of their own"
        ),
        "teacher_models.*.inference.load_format": Drop(
            "teachers are read from their files", ("auto", "safetensors")
        ),
        "teacher_models.*.inference.disable_log_stats": Drop(
            "a teacher's statistics show whether it hangs"
        ),
        "teacher_models.*.inference.skip_tokenizer_init": Drop("teachers read token ids"),
        "teacher_models.*.inference.*_parallel_size": Drop(_ONE_DEVICE, (1,)),
    },
    "distillation.distillation_loss": {
        "loss_mode": _OF_LOSS,
        "reverse_kl_weight": _OF_LOSS,
        "forward_kl_weight": _OF_LOSS,
        "rejected_draft_use_reverse_kl": With(
            ("opd.rejected_loss",), values.losses, "true: the estimator, whatever the weights"
        ),
        "use_tv_loss": With(
            ("opd.response_loss", "opd.rejected_stream_weight", "opd.response_position_decay"),
            values.losses,
            "true: e2e_tv, which scores rejected proposals with their blocks",
        ),
        "rejected_draft_stream_weight": With(
            ("opd.rejected_stream_weight",), values.losses, "0 with use_tv_loss"
        ),
        "response_stream_weight": To("opd.response_stream_weight"),
        "rejected_draft_position_decay": With(
            ("opd.rejected_position_decay", "opd.response_position_decay"),
            values.decays,
            "0.9 when not given",
        ),
        "rejected_draft_position_decay_enabled": With(
            ("opd.rejected_position_decay",), values.decays, "false: 1"
        ),
        "accept_draft_position_decay_enabled": With(
            ("opd.response_position_decay",), values.decays, "the same decay, or 1"
        ),
        "rejected_draft_first_token_only": To("opd.rejected_first_only", values.flag),
        "loss_max_clamp": To("opd.loss_max_clamp"),
        "log_prob_min_clamp": To("opd.log_prob_min_clamp"),
        "topk": To("teacher.top_k"),
        "use_policy_gradient": To("opd.policy_gradient", values.flag),
        "policy_loss_mode": Drop("PPO's clipped objective", ("vanilla",)),
        "clip_ratio": To("opd.clip_ratio"),
        "clip_ratio_low": To("opd.clip_ratio"),
        "clip_ratio_high": To("opd.clip_ratio"),
        "use_task_rewards": Drop(
            "a reward is a function, opd.reward, with opd.policy_gradient=true", (False,)
        ),
        "distillation_loss_coef": Drop("it is the only loss", (1,)),
        "use_replay_dis": Drop(
            "diagnostics that train nothing; opd.replay_check_freq compares replay and engine"
        ),
        "confidence_loss_weight": To("opd.confidence_weight"),
        "confidence_tv_target_mix": Drop("confidence learns what was accepted", (0,)),
    },
    "trainer": {
        "n_gpus_per_node": With(
            ("trainer.n_student_workers", "trainer.nnodes"),
            values.students,
            "times trainer.nnodes, 1 when not given",
        ),
        "default_local_dir": To("trainer.run_dir", note="holds all of the run"),
        "warmup_steps": To("sft.steps"),
        "logger": To(
            "trainer.logger", values.loggers, "a list inside a string is read; file: jsonl"
        ),
        "resume_mode": To("trainer.resume_mode", values.or_path, "resume_path: path"),
        "max_actor_ckpt_to_keep": To("trainer.keep_last"),
        "max_critic_ckpt_to_keep": Drop("no critic"),
        "critic_warmup": Drop("no critic", (0,)),
        "balance_batch": Drop(_HOW_A_STEP_RUNS),
        "log_val_generations": Drop("logs/samples.log shows one response per step"),
        "val_only": Drop("`verl-opd eval` measures without training", (False,)),
        "default_hdfs_dir": Drop("checkpoints stay in trainer.run_dir", (None,)),
        "del_local_ckpt_after_load": Drop("trainer.keep_last decides", (False,)),
        "use_legacy_worker_impl": Drop("there is one trainer implementation"),
        "save_start_step": Drop(
            "checkpoints are written from the start, and trainer.keep_last of them stay"
        ),
        "save_by_test_metric_enabled": Drop(
            "checkpoints/best is always the one with the highest held-out accept length", (False,)
        ),
        "save_by_test_metric_key": Drop("without effect unless save_by_test_metric_enabled"),
        "save_by_test_metric_threshold": Drop("without effect unless save_by_test_metric_enabled"),
        "rollout_speed_test_only": Drop("validation measures accept length", (True,)),
        "rollout_speed_test_max_samples_per_benchmark": To("data.val_max_samples"),
        "initial_val_max_samples_per_benchmark": To("data.val_max_samples"),
        "rollout_speed_test_worker_count": Drop("held-out prompts go to all engines"),
        "initial_val_worker_count": Drop("held-out prompts go to all engines"),
        "rollout_speed_test_clear_kv_cache": Drop("every draft push empties the prefix cache"),
        "initial_val_clear_kv_cache": Drop("every draft push empties the prefix cache"),
        "initial_val_repeat_times": Drop("measured once: greedy answers to the same prompts"),
    },
    "algorithm": {
        "adv_estimator": Drop("no advantages are estimated", ("grpo",)),
        "use_kl_in_reward": Drop("no rewards", (False,)),
        "*": Unsupported(_NO_REWARDS),
    },
    "critic": {"*": Unsupported(_NO_REWARDS)},
    "reward_model": {"*": Unsupported(_NO_REWARDS)},
    "custom_reward_function": {"*": Unsupported(_NO_REWARDS)},
    "ray_kwargs.ray_init": {
        "num_cpus": To("ray.num_cpus"),
        "runtime_env.*": To("ray.runtime_env.*"),
    },
    "warmup": {name: To(f"sft.{name}") for name in keys_of("sft") if name != "steps"},
    "training": {name: To(f"compute.{name}") for name in keys_of("compute")},
}
TABLE: dict[str, AliasRow] = {
    f"{section}.{name}": row for section, rows in SECTIONS.items() for name, row in rows.items()
}
