"""What each server of a run is started with."""

from __future__ import annotations

from pathlib import Path

from verl_opd.controller.job import Job
from verl_opd.controller.placement import Placement
from verl_opd.drafts import get_family
from verl_opd.engines.settings import EngineSettings, Host, Speculation
from verl_opd.opd.names import TOP_K_LOSS
from verl_opd.rollout.teacher import TeacherSettings


def engine_settings(
    job: Job, placement: Placement, draft_path: Path, logs: Path
) -> list[EngineSettings]:
    """One engine per student worker, all equal but for cores and log file."""
    cfg, family = job.cfg, get_family(job.cfg.draft.family)
    rollout, data = cfg.rollout, cfg.data
    length = (
        rollout.max_model_len
        or data.max_prompt_length + data.max_response_length + 2 * rollout.num_speculative_tokens
    )
    speculation = Speculation(
        draft_path=str(draft_path),
        method=family.engine_method,
        num_speculative_tokens=rollout.num_speculative_tokens,
        target_layer_ids=tuple(family.layer_ids(job.draft_config)),
        mask_token_id=family.mask_token_id(job.draft_config),
        engine_names=family.engine_names,
        token_map=job.token_map,
        v2_runner=family.v2_runner,
    )
    return [
        EngineSettings(
            model_path=cfg.target.path,
            dtype=cfg.target.dtype,
            max_model_len=length,
            max_num_seqs=rollout.max_num_seqs,
            trust_remote_code=cfg.target.trust_remote_code,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            seed=cfg.trainer.seed,
            stall_timeout=rollout.stall_timeout,
            engine_kwargs=rollout.engine_kwargs,
            host=Host(
                device=job.device.name,
                cpu_cores=slot.cores,
                kv_cache_gb=rollout.kv_cache_gb,
                role=f"engine {slot.index}",
                log_path=str(logs / f"rollout_{slot.index}.log"),
            ),
            speculation=speculation,
        )
        for slot in placement.slots
    ]


def teacher_settings(job: Job, placement: Placement, logs: Path) -> list[TeacherSettings]:
    """teacher.replicas servers per model."""
    cfg, data = job.cfg, job.cfg.data
    models = [
        (name, path) for name, path in job.teachers.items() for _ in range(cfg.teacher.replicas)
    ]
    return [
        TeacherSettings(
            name,
            EngineSettings(
                model_path=path,
                dtype=cfg.target.dtype,
                max_model_len=data.max_prompt_length + data.max_response_length + 1,
                max_num_seqs=cfg.teacher.max_num_seqs,
                trust_remote_code=cfg.target.trust_remote_code,
                gpu_memory_utilization=cfg.teacher.gpu_memory_utilization,
                enforce_eager=cfg.rollout.enforce_eager,
                seed=cfg.trainer.seed,
                stall_timeout=cfg.rollout.stall_timeout,
                engine_kwargs=cfg.teacher.engine_kwargs,
                host=Host(
                    device=job.device.name,
                    cpu_cores=slot.cores,
                    kv_cache_gb=cfg.teacher.kv_cache_gb,
                    role=f"teacher {slot.index}",
                    log_path=str(logs / f"teacher_{slot.index}.log"),
                ),
            ),
            top_k=cfg.teacher.top_k if cfg.opd.response_loss == TOP_K_LOSS else 0,
        )
        for (name, path), slot in zip(models, placement.teacher_slots, strict=True)
    ]
