"""Override lines that count together, lines that contradict each other, and a whole launcher."""

from __future__ import annotations

from tests.alias_rows import ACTOR, INFERENCE, LOSS, MODEL, ROLLOUT, TEACHER, VERL, each

TOGETHER: list[tuple[list[str], list[str]]] = [
    ([f"{LOSS}loss_mode=k3"], ["opd.response_loss=k3", "opd.rejected_loss=k3"]),
    ([f"{LOSS}loss_mode=kl"], ["opd.response_loss=k1", "opd.rejected_loss=k1"]),
    (
        [f"{LOSS}loss_mode=mse", f"{LOSS}rejected_draft_stream_weight=0"],
        ["opd.response_loss=k2", "opd.rejected_loss=k2", "opd.rejected_stream_weight=0"],
    ),
    (
        [f"{LOSS}reverse_kl_weight=0.0", f"{LOSS}forward_kl_weight=1.0"],
        ["opd.response_loss=forward_kl", "opd.rejected_loss=forward_kl"],
    ),
    (
        [
            f"{LOSS}loss_mode=low_var_kl",
            f"{LOSS}reverse_kl_weight=0",
            f"{LOSS}forward_kl_weight=1",
            f"{LOSS}rejected_draft_use_reverse_kl=True",
        ],
        ["opd.response_loss=forward_kl", "opd.rejected_loss=k3"],
    ),
    (
        [
            f"{LOSS}use_tv_loss=True",
            f"{LOSS}loss_mode=k3",
            f"{LOSS}rejected_draft_stream_weight=1.0",
            f"{LOSS}accept_draft_position_decay_enabled=False",
        ],
        [
            "opd.response_loss=e2e_tv",
            "opd.rejected_stream_weight=0",
            "opd.response_position_decay=1.0",
        ],
    ),
    (
        [
            f"{LOSS}loss_mode=eagle3_native_target_distribution",
            f"{LOSS}rejected_draft_stream_weight=0.0",
        ],
        ["opd.response_loss=full_forward_kl", "opd.rejected_stream_weight=0.0"],
    ),
    (
        [
            f"{VERL}eagle3_response_loss_mode=native_target_distribution",
            "opd.rejected_stream_weight=0",
        ],
        ["opd.response_loss=full_forward_kl", "opd.rejected_stream_weight=0"],
    ),
    (
        [f"{LOSS}loss_mode=forward_kl_topk", "opd.rejected_stream_weight=0"],
        ["opd.response_loss=forward_kl_topk", "opd.rejected_stream_weight=0"],
    ),
    (
        [
            f"{LOSS}rejected_draft_position_decay=0.8",
            f"{LOSS}accept_draft_position_decay_enabled=True",
        ],
        ["opd.rejected_position_decay=0.8", "opd.response_position_decay=0.8"],
    ),
    (
        [
            f"{LOSS}rejected_draft_position_decay=0.8",
            f"{LOSS}rejected_draft_position_decay_enabled=False",
        ],
        ["opd.rejected_position_decay=1.0"],
    ),
    (
        [f"{VERL}composed_dflash_student=True", f"{ROLLOUT}mtp.method=dspark"],
        ["draft.family=dspark"],
    ),
    (
        [f"{VERL}composed_dflash_student=True", f"{VERL}composed_eagle3_student=False"],
        ["draft.family=dflash"],
    ),
    (["trainer.n_gpus_per_node=7"], ["trainer.n_student_workers=7", "trainer.nnodes=1"]),
    (
        ["trainer.n_gpus_per_node=7", "trainer.nnodes=2"],
        ["trainer.n_student_workers=14", "trainer.nnodes=2"],
    ),
    (["distillation.n_gpus_per_node=2", "distillation.nnodes=2"], ["teacher.replicas=4"]),
    (["distillation.n_gpus_per_node=0"], []),
    (
        [
            f"distillation.teacher_models.{x}"
            for x in (
                "math.key=m/x",
                "math.model_path=/m",
                "code.model_path=/c",
                "teacher_model.model_path=/t",
            )
        ]
        + ["distillation.n_gpus_per_node=4"],
        ["teacher.models={code: '/c', m/x: '/m'}", "teacher.replicas=2"],
    ),
    (
        ["data.train_batch_size=28", f"{ACTOR}ppo_mini_batch_size=28"],
        ["data.train_batch_size=28", "trainer.updates_per_step=1"],
    ),
    (
        ["data.train_batch_size=28", f"{ACTOR}ppo_mini_batch_size=7"],
        ["data.train_batch_size=28", "trainer.updates_per_step=4"],
    ),
    (
        [
            "data.max_prompt_length=512",
            "data.max_response_length=4096",
            f"{ROLLOUT}max_model_len=4609",
        ],
        [
            "data.max_prompt_length=512",
            "data.max_response_length=4096",
            "rollout.max_model_len=null",
        ],
    ),
    (
        [
            "data.max_prompt_length=512",
            "data.max_response_length=4096",
            f"{ROLLOUT}max_model_len=5000",
        ],
        [
            "data.max_prompt_length=512",
            "data.max_response_length=4096",
            "rollout.max_model_len=5000",
        ],
    ),
]

CONFLICTS: list[tuple[list[str], list[str]]] = [
    ([f"{MODEL}path=/a", "target.path=/b"], [f"{MODEL}path=/a", "target.path=/b"]),
    (
        [f"++{VERL}dflash_draft_model_path=/a", f"++{ROLLOUT}mtp.draft_model_path=/b"],
        ["dflash_draft_model_path=/a", "mtp.draft_model_path=/b"],
    ),
    (
        ["trainer.n_student_workers=8", "trainer.n_gpus_per_node=7"],
        ["trainer.n_student_workers=8", "trainer.n_gpus_per_node=7"],
    ),
    (["optim.lr=1e-4", f"{ACTOR}optim.lr=1e-5"], ["optim.lr=1e-4", "optim.lr=1e-5"]),
    (
        [f"{LOSS}clip_ratio_low=0.1", f"{LOSS}clip_ratio_high=0.3"],
        ["clip_ratio_low=0.1", "clip_ratio_high=0.3"],
    ),
    ([f"{LOSS}loss_mode=k3", "opd.response_loss=k2"], ["opd.response_loss=k2", "loss_mode=k3"]),
    (
        [f"{LOSS}use_tv_loss=True", "opd.rejected_stream_weight=1"],
        ["use_tv_loss=True", "opd.rejected_stream_weight=1"],
    ),
    (
        [f"{VERL}composed_eagle3_student=True", f"{ROLLOUT}mtp.method=dflash"],
        ["dflash and eagle3", "use draft.family"],
    ),
    (
        [
            f"{LOSS}loss_mode=eagle3_native_target_distribution",
            f"{VERL}eagle3_response_loss_mode=scalar_k3",
            "opd.rejected_stream_weight=0",
        ],
        ["loss_mode=eagle3_native", "scalar_k3"],
    ),
    (
        [
            "distillation.n_gpus_per_node=3",
            "distillation.teacher_models.a.model_path=/a",
            "distillation.teacher_models.b.model_path=/b",
        ],
        ["3 devices", "2 teachers", "teacher.replicas"],
    ),
    (
        [
            f"{LOSS}loss_mode=k3",
            f"{VERL}eagle3_response_loss_mode=native_target_distribution",
            "opd.rejected_stream_weight=0",
        ],
        ["loss_mode=k3", "native_target_distribution", "keep one"],
    ),
    (["distillation.n_gpus_per_node=3", f"{TEACHER}num_replicas=2"], ["3 devices", "[2]"]),
    (
        [
            f"distillation.teacher_models.{x}"
            for x in ("a.model_path=/a", "b.model_path=/b", "a.key=k", "b.key=k")
        ],
        ["teacher_models.b.key=k", "differ"],
    ),
    (
        ["data.train_batch_size=28", f"{ACTOR}ppo_mini_batch_size=10"],
        ["ppo_mini_batch_size=10", "data.train_batch_size=28"],
    ),
    (
        [
            "data.train_batch_size=28",
            f"{ACTOR}ppo_mini_batch_size=7",
            "trainer.update_accumulation_steps=10",
        ],
        ["ppo_mini_batch_size=7", "trainer.update_accumulation_steps=10"],
    ),
]

# The keys of Draft-OPD's launchers, with the values of the one for vLLM on NPUs.
LAUNCHER = [
    *each(
        "data.",
        "train_files=['/data/mixed_user_prompt.jsonl'] "
        "val_files=['/data/aime24.jsonl','/data/gsm8k_128_user_prompt.jsonl'] "
        "max_prompt_length=512 max_response_length=4096 train_batch_size=28 "
        "filter_overlong_prompts=True truncation='error' shuffle=True seed=42",
    ),
    "+data.apply_chat_template_kwargs.enable_thinking=False",
    *each(
        "algorithm.",
        "adv_estimator=grpo use_kl_in_reward=False",
    ),
    *each(
        MODEL,
        "path=Qwen/Qwen3-4B trust_remote_code=True enable_gradient_checkpointing=True "
        "use_remove_padding=True",
    ),
    *each(
        f"+{VERL}",
        "composed_dflash_student=True dflash_main_model_path=Qwen/Qwen3-4B "
        "dflash_draft_model_path=/draft",
    ),
    *each(
        f"++{VERL}",
        "dflash_attention_impl=sdpa dflash_lm_head_chunk_size=512 "
        "dflash_response_anchor_stride=1 dflash_max_response_anchors=186 "
        "dflash_random_response_anchor_enabled=False dflash_random_response_anchor_seed=42",
    ),
    *each(
        "distillation.",
        "enabled=True n_gpus_per_node=2 nnodes=1",
    ),
    f"{TEACHER}model_path=Qwen/Qwen3-4B",
    *each(
        INFERENCE,
        "tensor_model_parallel_size=1 name=vllm temperature=1.0 gpu_memory_utilization=0.2 "
        "enforce_eager=False max_model_len=4609 max_num_batched_tokens=4609 max_num_seqs=256",
    ),
    *each(
        LOSS,
        "loss_mode=k3 topk=1 use_task_rewards=False use_policy_gradient=False "
        "reverse_kl_weight=0.0 forward_kl_weight=1.0 rejected_draft_use_reverse_kl=True "
        "response_stream_weight=1.0 rejected_draft_stream_weight=1.0 "
        "rejected_draft_position_decay_enabled=True rejected_draft_position_decay=0.8 "
        "loss_max_clamp=10.0 log_prob_min_clamp=-10.0",
    ),
    *each(
        ACTOR,
        "optim.lr=3e-4 optim.lr_scheduler_type=cosine optim.lr_warmup_steps_ratio=0.05 "
        "data_loader_seed=42 ppo_mini_batch_size=28 ppo_micro_batch_size_per_gpu=1 "
        "ppo_max_token_len_per_gpu=4608 use_dynamic_bsz=True fsdp_config.param_offload=False "
        "fsdp_config.seed=42 use_kl_loss=False",
    ),
    *each(
        ROLLOUT,
        "name=vllm n=1 tensor_model_parallel_size=1 temperature=0.0 load_format=auto "
        "calculate_log_probs=False max_model_len=4609 max_num_batched_tokens=4609 "
        "max_num_seqs=256 gpu_memory_utilization=0.4 free_cache_engine=True "
        "enforce_eager=False agent.num_workers=14 val_kwargs.do_sample=False "
        "val_kwargs.temperature=0.0 val_kwargs.top_k=1 val_kwargs.top_p=1.0 val_kwargs.n=1",
    ),
    *each(
        f"++{ROLLOUT}",
        "mtp._target_=a.b.MtpConfig mtp.enable=True mtp.enable_rollout=True mtp.method=dflash "
        "mtp.num_speculative_tokens=7 mtp.draft_model_path=/draft",
    ),
    f'++{ROLLOUT}engine_kwargs.vllm.compilation_config={{"cudagraph_mode": "PIECEWISE", '
    '"cudagraph_capture_sizes": [8,16,32,64]}',
    f"+{ROLLOUT}engine_kwargs.sglang.speculative_algorithm=DFLASH",
    *each(
        "trainer.",
        'logger=["console","wandb"] project_name=draft-opd experiment_name=vllm-npu '
        "default_local_dir=/ckpt n_gpus_per_node=14 nnodes=1 update_accumulation_steps=10 "
        "save_freq=500 save_start_step=5000 test_freq=250 rollout_speed_test_only=True "
        "total_epochs=8 rollout_speed_test_max_samples_per_benchmark=28 "
        "rollout_speed_test_worker_count=14 resume_mode=disable "
        "rollout_speed_test_clear_kv_cache=True val_before_train=True log_val_generations=10",
    ),
]
