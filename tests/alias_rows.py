"""Override lines for every row of verl_opd/compat/aliases.py, one at a time."""

from __future__ import annotations

MODEL = "actor_rollout_ref.model."
VERL = f"{MODEL}override_config.verl_"
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
TEACHER = "distillation.teacher_models.teacher_model."
INFERENCE = f"{TEACHER}inference."
LOSS = "distillation.distillation_loss."


def each(prefix: str, names: str) -> list[str]:
    """Override lines: the names, which blanks separate, behind the prefix."""
    return [prefix + name for name in names.split()]


RENAMED: list[tuple[str, str]] = [
    (
        "data.train_files=\"['a b.jsonl','c,d.jsonl']\"",
        "data.train_files=['a b.jsonl','c,d.jsonl']",
    ),
    (
        "data.val_files=['/d/AIME24_user_prompt.jsonl','/d/mbpp-x_128.jsonl','/e/aime24.jsonl']",
        "data.val_files={aime24: '/d/AIME24_user_prompt.jsonl', mbpp_x: '/d/mbpp-x_128.jsonl', "
        "aime24_2: '/e/aime24.jsonl'}",
    ),
    (
        "data.val_files=/d/gsm8k_128_user_prompt.jsonl",
        "data.val_files={gsm8k: '/d/gsm8k_128_user_prompt.jsonl'}",
    ),
    ("data.train_max_samples=-1", "data.max_samples=null"),
    ("data.train_max_samples=100", "data.max_samples=100"),
    ("data.val_max_samples=-1", "data.val_max_samples=null"),
    ("data.trust_remote_code=True", "target.trust_remote_code=True"),
    (f"{MODEL}path=Qwen/Qwen3-4B", "target.path=Qwen/Qwen3-4B"),
    (f"{MODEL}trust_remote_code=True", "target.trust_remote_code=True"),
    (f"{MODEL}enable_gradient_checkpointing=True", "compute.gradient_checkpointing=true"),
    (f"{VERL}composed_dflash_student=True", "draft.family=dflash"),
    (f"{VERL}composed_eagle3_student=True", "draft.family=eagle3"),
    (f"{VERL}dflash_draft_variant=dspark", "draft.family=dspark"),
    (f"{VERL}dflash_main_model_path=/m", "target.path=/m"),
    (f"{VERL}eagle3_main_model_path=/m", "target.path=/m"),
    (f"{VERL}dflash_draft_model_path=/d", "draft.path=/d"),
    (f"{VERL}eagle3_draft_model_path=/d", "draft.path=/d"),
    (f"{VERL}dflash_attention_impl=flex_attention", "compute.attention=sdpa"),
    (f"{VERL}dflash_attention_impl=auto", "compute.attention=sdpa"),
    (f"{VERL}dflash_attention_impl=eager", "compute.attention=eager"),
    (f"{VERL}dflash_lm_head_chunk_size=512", "compute.lm_head_chunk_size=512"),
    (f"{VERL}eagle3_lm_head_chunk_size=2048", "compute.lm_head_chunk_size=2048"),
    (f"{VERL}dflash_response_anchor_stride=2", "opd.response_anchor_stride=2"),
    (f"{VERL}eagle3_response_anchor_stride=2", "opd.response_anchor_stride=2"),
    (f"{VERL}dflash_max_response_anchors=186", "opd.max_response_anchors=186"),
    (f"{VERL}dflash_rejected_draft_max_tokens_per_sample=null", "opd.max_rejected_tokens=0"),
    (f"{VERL}dflash_rejected_draft_max_tokens_per_sample=64", "opd.max_rejected_tokens=64"),
    (f"{VERL}dflash_random_response_anchor_enabled=1", "opd.random_anchors=true"),
    (f"{VERL}eagle3_random_response_anchor_enabled=False", "opd.random_anchors=false"),
    (f"{VERL}eagle3_replay_block_size=8", "rollout.num_speculative_tokens=7"),
    (f"{VERL}eagle3_ttt_length=7", "rollout.num_speculative_tokens=7"),
    (f"{ACTOR}ppo_epochs=2", "trainer.update_epochs=2"),
    (f"{ACTOR}ppo_max_token_len_per_gpu=9216", "compute.max_tokens_per_micro_batch=9216"),
    (f"{ACTOR}data_loader_seed=42", "trainer.seed=42"),
    (f"{ACTOR}grad_clip=1.0", "optim.grad_clip=1.0"),
    (f"{ACTOR}optim.lr=3e-4", "optim.lr=3e-4"),
    (f"{ACTOR}optim.lr_warmup_steps_ratio=0.05", "optim.lr_warmup_ratio=0.05"),
    (f"{ACTOR}optim.min_lr_ratio=0.1", "optim.min_lr_ratio=0.1"),
    (f"{ACTOR}optim.betas=[0.9,0.95]", "optim.betas=[0.9,0.95]"),
    (f"{ACTOR}optim.weight_decay=0.01", "optim.weight_decay=0.01"),
    (f"{ACTOR}optim.clip_grad=0.5", "optim.grad_clip=0.5"),
    (f"{ACTOR}fsdp_config.seed=7", "trainer.seed=7"),
    (f"{ACTOR}fsdp_config.dtype=bf16", "compute.param_dtype=bfloat16"),
    (f"{ACTOR}fsdp_config.mixed_precision.param_dtype=fp32", "compute.param_dtype=float32"),
    (f"{ROLLOUT}dtype=bfloat16", "target.dtype=bfloat16"),
    (f"{ROLLOUT}temperature=0.0", "rollout.temperature=0.0"),
    (f"{ROLLOUT}top_p=0.9", "rollout.top_p=0.9"),
    (f"{ROLLOUT}top_k=-1", "rollout.top_k=-1"),
    (f"{ROLLOUT}prompt_length=512", "data.max_prompt_length=512"),
    (f"{ROLLOUT}response_length=4096", "data.max_response_length=4096"),
    (f"{ROLLOUT}gpu_memory_utilization=0.4", "rollout.gpu_memory_utilization=0.4"),
    (f"{ROLLOUT}max_num_seqs=256", "rollout.max_num_seqs=256"),
    (f"{ROLLOUT}max_model_len=8192", "rollout.max_model_len=8192"),
    (f"{ROLLOUT}max_model_len=null", "rollout.max_model_len=null"),
    (f"{ROLLOUT}max_num_batched_tokens=4609", "rollout.engine_kwargs.max_num_batched_tokens=4609"),
    (
        f"{ROLLOUT}cudagraph_capture_sizes=[8,16]",
        "rollout.engine_kwargs.compilation_config.cudagraph_capture_sizes=[8,16]",
    ),
    (f"{ROLLOUT}enable_chunked_prefill=True", "rollout.engine_kwargs.enable_chunked_prefill=True"),
    (f"{ROLLOUT}enable_prefix_caching=False", "rollout.engine_kwargs.enable_prefix_caching=False"),
    (f"{ROLLOUT}enforce_eager=False", "rollout.enforce_eager=False"),
    (f"{ROLLOUT}agent.num_workers=14", "rollout.agent.num_workers=14"),
    (f"{ROLLOUT}agent.default_agent_loop=single_turn_agent", "rollout.agent.loop=single_turn"),
    (f"{ROLLOUT}mtp.method=eagle3", "draft.family=eagle3"),
    (f"{ROLLOUT}mtp.num_speculative_tokens=7", "rollout.num_speculative_tokens=7"),
    (f"{ROLLOUT}mtp.draft_model_path=/d", "draft.path=/d"),
    (f"{ROLLOUT}engine_kwargs.vllm={{block_size: 32}}", "rollout.engine_kwargs={block_size: 32}"),
    (f"{ROLLOUT}engine_kwargs.vllm.block_size=32", "rollout.engine_kwargs.block_size=32"),
    ("distillation.teacher_logprob_source=composed_main", "teacher.source=composed"),
    ("distillation.teacher_logprob_source=server", "teacher.source=server"),
    ("distillation.teacher_key=domain", "teacher.key=domain"),
    ("distillation.n_gpus_per_node=2", "teacher.replicas=2"),
    (f"{TEACHER}num_replicas=2", "teacher.replicas=2"),
    (f"{TEACHER}model_path='/t, x'", "teacher.models={default: '/t, x'}"),
    (f"{INFERENCE}gpu_memory_utilization=0.2", "teacher.gpu_memory_utilization=0.2"),
    (f"{INFERENCE}max_num_seqs=256", "teacher.max_num_seqs=256"),
    (
        f"{INFERENCE}max_num_batched_tokens=4609",
        "teacher.engine_kwargs.max_num_batched_tokens=4609",
    ),
    (
        f"{INFERENCE}enable_chunked_prefill=True",
        "teacher.engine_kwargs.enable_chunked_prefill=True",
    ),
    (f"{INFERENCE}enable_prefix_caching=True", "teacher.engine_kwargs.enable_prefix_caching=True"),
    (f"{INFERENCE}engine_kwargs.vllm.block_size=32", "teacher.engine_kwargs.block_size=32"),
    (f"{LOSS}rejected_draft_use_reverse_kl=True", "opd.rejected_loss=k3"),
    (f"{LOSS}rejected_draft_stream_weight=2.0", "opd.rejected_stream_weight=2.0"),
    (f"{LOSS}response_stream_weight=1.0", "opd.response_stream_weight=1.0"),
    (f"{LOSS}rejected_draft_position_decay=0.8", "opd.rejected_position_decay=0.8"),
    (f"{LOSS}rejected_draft_position_decay_enabled=False", "opd.rejected_position_decay=1.0"),
    (f"{LOSS}rejected_draft_position_decay_enabled=True", "opd.rejected_position_decay=0.9"),
    (f"{LOSS}accept_draft_position_decay_enabled=True", "opd.response_position_decay=0.9"),
    (f"{LOSS}rejected_draft_first_token_only=True", "opd.rejected_first_only=true"),
    (f"{LOSS}loss_max_clamp=null", "opd.loss_max_clamp=null"),
    (f"{LOSS}log_prob_min_clamp=-10.0", "opd.log_prob_min_clamp=-10.0"),
    (f"{LOSS}topk=1", "teacher.top_k=1"),
    (f"{LOSS}use_policy_gradient=False", "opd.policy_gradient=false"),
    (f"{LOSS}clip_ratio=0.2", "opd.clip_ratio=0.2"),
    (f"{LOSS}clip_ratio_low=0.1", "opd.clip_ratio=0.1"),
    (f"{LOSS}clip_ratio_high=0.3", "opd.clip_ratio=0.3"),
    (f"{LOSS}confidence_loss_weight=0.5", "opd.confidence_weight=0.5"),
    ("trainer.default_local_dir=/runs/x", "trainer.run_dir=/runs/x"),
    ("trainer.logger=\"['console','wandb']\"", "trainer.logger=[console,wandb]"),
    ("trainer.logger=[console,file]", "trainer.logger=[console,jsonl]"),
    ("trainer.resume_mode=resume_path", "trainer.resume_mode=path"),
    ("trainer.max_actor_ckpt_to_keep=3", "trainer.keep_last=3"),
    ("trainer.rollout_speed_test_max_samples_per_benchmark=28", "data.val_max_samples=28"),
    ("trainer.initial_val_max_samples_per_benchmark=28", "data.val_max_samples=28"),
    ("trainer.warmup_steps=6", "sft.steps=6"),
    ("warmup.anchors_per_sample=16", "sft.anchors_per_sample=16"),
    ("warmup.files=['a b.jsonl']", "sft.files=['a b.jsonl']"),
    ("warmup.loss=tv", "sft.loss=tv"),
    ("warmup.lr=1e-3", "sft.lr=1e-3"),
    ("warmup.messages_key=turns", "sft.messages_key=turns"),
    ("warmup.position_decay=0.7", "sft.position_decay=0.7"),
    ("warmup.samples_per_update=2", "sft.samples_per_update=2"),
    ("warmup.updates_per_step=140", "sft.updates_per_step=140"),
    ("training.attention=eager", "compute.attention=eager"),
    ("training.feature_cache_mb=64", "compute.feature_cache_mb=64"),
    ("training.gradient_checkpointing=true", "compute.gradient_checkpointing=true"),
    ("training.lm_head_chunk_size=128", "compute.lm_head_chunk_size=128"),
    ("training.max_tokens_per_micro_batch=64", "compute.max_tokens_per_micro_batch=64"),
    ("training.num_threads=2", "compute.num_threads=2"),
    ("training.param_dtype=float32", "compute.param_dtype=float32"),
    ("ray_kwargs.ray_init.num_cpus=8", "ray.num_cpus=8"),
    ("ray_kwargs.ray_init.runtime_env.env_vars={A: b}", "ray.runtime_env.env_vars={A: b}"),
]

DROPPED = [
    *each(
        "data.",
        "filter_overlong_prompts=True filter_overlong_prompts_workers=4 truncation='error' "
        "return_raw_chat=True validation_shuffle=False val_batch_size=8 "
        "dataloader_num_workers=8 reward_fn_key=data_source",
    ),
    *each(
        "actor_rollout_ref.",
        "hybrid_engine=True nccl_timeout=600 ref.fsdp_config.param_offload=True",
    ),
    *each(
        MODEL,
        "enable_activation_offload=False use_remove_padding=True use_fused_kernels=False "
        "use_shm=False lora_rank=0",
    ),
    *each(
        VERL,
        "dflash_random_response_anchor_seed=42 eagle3_random_response_anchor_seed=42 "
        "eagle3_ttt_step_weight=0.8 eagle3_response_stream_impl=anchor_block "
        "eagle3_response_loss_mode=scalar_k3 dflash_draft_variant=auto",
    ),
    *each(
        ACTOR,
        "strategy=fsdp2 strategy=fsdp ppo_micro_batch_size_per_gpu=1 "
        "ppo_micro_batch_size=null use_dynamic_bsz=True use_torch_compile=True "
        "entropy_coeff=0 entropy_checkpointing=True entropy_from_logits_with_chunking=True "
        "use_kl_loss=False kl_loss_coef=0.001 kl_loss_type=low_var_kl "
        "loss_agg_mode=token-mean ulysses_sequence_parallel_size=1 "
        "checkpoint.save_contents=[model,extra] optim.lr_scheduler_type=cosine "
        "optim.warmup_style=cosine optim.num_cycles=0.5 optim.lr_warmup_steps=-1 "
        "optim.total_training_steps=-1 optim.optimizer=AdamW fsdp_config.model_dtype=fp32 "
        "fsdp_config.param_offload=False fsdp_config.optimizer_offload=False "
        "fsdp_config.offload_policy=False fsdp_config.fsdp_size=-1 "
        "fsdp_config.reshard_after_forward=True fsdp_config.forward_prefetch=False "
        "fsdp_config.ulysses_sequence_parallel_size=1",
    ),
    *each(
        ROLLOUT,
        "name=vllm mode=async n=1 tensor_model_parallel_size=1 data_parallel_size=1 "
        "expert_parallel_size=1 pipeline_model_parallel_size=1 n_gpus_per_node=8 nnodes=0 "
        "load_format=auto do_sample=False ignore_eos=False free_cache_engine=True "
        "calculate_log_probs=False log_prob_micro_batch_size_per_gpu=1 "
        "log_prob_use_dynamic_bsz=True disable_log_stats=True skip_tokenizer_init=True "
        "layered_summon=True multi_turn.enable=False val_kwargs.do_sample=False "
        "val_kwargs.temperature=0.0 val_kwargs.top_k=1 val_kwargs.top_p=1.0 val_kwargs.n=1 "
        "agent.agent_loop_config_path=null mtp._target_=a.b.C mtp.enable=True "
        "mtp.enable_rollout=True",
    ),
    f"{ROLLOUT}engine_kwargs.sglang={{tp_size: 1}}",
    *each(
        ROLLOUT,
        "engine_kwargs.sglang.speculative_algorithm=DFLASH "
        "engine_kwargs.sglang.attention_backend=fa3",
    ),
    *each(
        "distillation.",
        "enabled=True nnodes=1",
    ),
    *each(
        TEACHER,
        "key=null model_path=null",
    ),
    *each(
        INFERENCE,
        "name=vllm temperature=1.0 dtype=bfloat16 enforce_eager=False max_model_len=4609 "
        "prompt_length=512 response_length=1 free_cache_engine=True load_format=auto "
        "disable_log_stats=True skip_tokenizer_init=False tensor_model_parallel_size=1 "
        "engine_kwargs.sglang.random_seed=42",
    ),
    *each(
        LOSS,
        "use_tv_loss=False policy_loss_mode=vanilla use_task_rewards=False "
        "distillation_loss_coef=1.0 use_replay_dis=True confidence_tv_target_mix=0.0",
    ),
    *each(
        "trainer.",
        "max_critic_ckpt_to_keep=1 critic_warmup=0 balance_batch=True log_val_generations=10 "
        "val_only=False default_hdfs_dir=null del_local_ckpt_after_load=False "
        "use_legacy_worker_impl=auto save_start_step=5000 save_by_test_metric_enabled=False "
        "save_by_test_metric_key=null save_by_test_metric_threshold=4.65 "
        "rollout_speed_test_only=True rollout_speed_test_worker_count=14 "
        "initial_val_worker_count=14 rollout_speed_test_clear_kv_cache=True "
        "initial_val_clear_kv_cache=null initial_val_repeat_times=2",
    ),
    *each(
        "algorithm.",
        "adv_estimator=grpo use_kl_in_reward=False",
    ),
]

UNSUPPORTED: list[tuple[str, str]] = [
    ("data.filter_overlong_prompts=False", "use true, or leave it out"),
    ("data.truncation=left", "prompts are never cut"),
    ("data.custom_cls.path=x.py", "JSONL"),
    ("data.val_files=['']", "none of them empty"),
    (f"{MODEL}lora_rank=16", "all of the draft is trained"),
    (f"{MODEL}external_lib=x", "verl_opd/drafts"),
    (f"{MODEL}tokenizer_path=x", "the tokenizer is the target's"),
    (f"{VERL}dflash_attention_impl=fa3", "flex_attention, auto, sdpa, eager"),
    (f"{VERL}dflash_draft_variant=mlp", "auto, dflash, dspark"),
    (f"{VERL}dflash_random_response_anchor_enabled=maybe", "true or false"),
    (f"{VERL}eagle3_replay_block_size=seven", "a whole number"),
    (f"{VERL}eagle3_response_stream_impl=full_ttt", "use anchor_block"),
    (f"{VERL}eagle3_response_loss_mode=ce", "scalar_k3, native_target_distribution"),
    (f"{ACTOR}strategy=megatron", "FSDP2"),
    (f"{ACTOR}entropy_coeff=0.01", "no entropy bonus"),
    (f"{ACTOR}use_kl_loss=True", "no reference model"),
    (f"{ACTOR}ppo_mini_batch_size=16", "add it, or use trainer.updates_per_step"),
    (f"{ACTOR}optim.lr_scheduler_type=constant", "use cosine"),
    (f"{ACTOR}optim.lr_warmup_steps=100", "optim.lr_warmup_ratio"),
    (f"{ACTOR}fsdp_config.param_offload=True", "nothing is offloaded"),
    (f"{ACTOR}fsdp_config.model_dtype=bf16", "master weights are float32"),
    (f"{ROLLOUT}name=sglang", "the engine is vLLM"),
    (f"{ROLLOUT}n=4", "use 1, or leave it out"),
    (f"{ROLLOUT}tensor_model_parallel_size=2", "one device"),
    (f"{ROLLOUT}load_format=dummy", "use auto or safetensors"),
    (f"{ROLLOUT}free_cache_engine=False", "engines sleep"),
    (f"{ROLLOUT}calculate_log_probs=True", "use false"),
    (f"{ROLLOUT}val_kwargs.temperature=0.7", "greedy"),
    (f"{ROLLOUT}agent.agent_loop_config_path=x.yaml", "use null"),
    (f"{ROLLOUT}agent.default_agent_loop=tool_agent", "single_turn_agent"),
    (f"{ROLLOUT}mtp.enable=False", "roll out together"),
    (f"{ROLLOUT}mtp.method=mtp", "dflash, eagle3, dspark"),
    (f"{ROLLOUT}mtp.draft_model_path=null", "directory of a draft"),
    ("distillation.enabled=False", "distillation is the only mode"),
    ("distillation.teacher_logprob_source=file", "auto, server, composed_main"),
    ("distillation.n_gpus_per_node=two", "a whole number"),
    (f"{INFERENCE}name=sglang", "vLLM"),
    (f"{INFERENCE}temperature=0.0", "temperature 1"),
    (f"{INFERENCE}expert_parallel_size=2", "one device"),
    (f"{LOSS}loss_mode=k3+", "opd.response_loss"),
    (f"{LOSS}reverse_kl_weight=0.5", "mix two divergences"),
    (f"{LOSS}forward_kl_weight=x", "a number"),
    (f"{LOSS}loss_mode=forward_kl_topk", "opd.rejected_stream_weight=0"),
    (f"{LOSS}use_task_rewards=True", "opd.reward"),
    (f"{LOSS}use_policy_gradient=2", "true or false"),
    ("trainer.n_gpus_per_node=abc", "a whole number"),
    ("trainer.critic_warmup=10", "no critic"),
    ("trainer.val_only=True", "verl-opd eval"),
    ("trainer.save_by_test_metric_enabled=True", "checkpoints/best"),
    ("trainer.rollout_speed_test_only=False", "accept length"),
    ("algorithm.adv_estimator=gae", "use grpo"),
    ("algorithm.kl_ctrl.kl_coef=0.1", "is not supported (no advantages"),
    ("critic.optim.lr=1e-5", "is not supported (no advantages"),
    ("reward_model.enable=False", "opd.reward"),
    ("custom_reward_function.path=x.py", "opd.reward"),
    (f"{ACTOR}optim.lr=1e-4,1e-5", "several values"),
]
