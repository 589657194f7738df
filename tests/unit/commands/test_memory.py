"""What `verl-opd plan` says about memory, against arithmetic by hand, public readings, and peaks
that were measured on a CPU.
"""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen3Config

from tests.drafts import QWEN3_4B_DFLASH
from verl_opd.commands.memory import (
    GB,
    Micro,
    Sizes,
    engine_lines,
    estimate,
    micro_batch,
    sizes_of,
    teacher_lines,
    trainer_lines,
)
from verl_opd.config.load import load_config
from verl_opd.config.schema import Config
from verl_opd.devices import DEVICES
from verl_opd.drafts import get_family

SIZES = Sizes(
    target_params=1000,
    target_hidden=8,
    target_intermediate=16,
    vocab=100,
    features=3,
    draft_params=50,
    draft_layers=2,
    draft_intermediate=16,
    width=8,
    kv=4,
    block=4,
)


def config() -> Config:
    cfg = Config()
    cfg.target.dtype, cfg.compute.param_dtype = "float32", "bfloat16"
    cfg.data.max_prompt_length, cfg.data.max_response_length = 20, 30
    cfg.compute.max_tokens_per_micro_batch, cfg.compute.lm_head_chunk_size = 10, 5
    cfg.opd.max_response_anchors = 5
    cfg.opd.rejected_stream_weight = 0
    return cfg


def test_the_largest_micro_batch_holds_at_least_one_of_the_longest_samples() -> None:
    cfg = config()
    # 5 anchors of 4 slots, 50 tokens of context: more than the 10 that the configuration allows
    assert micro_batch(cfg, SIZES) == Micro(50, 20, slots_per_sample=20)
    cfg.compute.max_tokens_per_micro_batch = 700
    assert micro_batch(cfg, SIZES) == Micro(500, 200, slots_per_sample=20)
    cfg.opd.max_response_anchors, cfg.opd.rejected_stream_weight = 0, 1
    assert micro_batch(cfg, SIZES).slots_per_sample == 30 * 4, "no more blocks than response tokens"


def test_parts_of_a_trainer_by_hand() -> None:
    lines = {
        line.what.split(":")[0].split(" of ")[0]: 0.0 for line in trainer_lines(config(), SIZES)
    }
    for line in trainer_lines(config(), SIZES):
        lines[line.what.split(":")[0].split(" of ")[0]] += line.device * GB
    assert lines["frozen target"] == pytest.approx(4000)
    assert lines["draft"] == pytest.approx(50 * 16 + 50 * 4)
    per_slot = (8 * 8 + 6 * 8 + 5 * 4 + 4 * 16) * 2 + 24 * 8 + 24 * (8 + 4)
    per_context = (5 * 4 + 2 * 8) * 2 + 24 * 4
    assert lines["draft activations"] == pytest.approx(
        (20 * per_slot + 50 * per_context) * 2 + 20 * (50 + 20) * 3
    )
    assert lines["target features and activations"] == pytest.approx(
        50 * (4 * 8 + 4 * 8 + 3 * 16) * 4
    )
    assert lines["LM head, 5 rows at a time"] == pytest.approx(4 * 5 * 100 * 4)


def test_more_ranks_share_the_draft_and_checkpointing_keeps_one_layer() -> None:
    one, two, saving = config(), config(), config()
    two.trainer.n_student_workers = 2
    saving.compute.gradient_checkpointing = True
    parts = [
        {line.what: line.device for line in trainer_lines(cfg, SIZES)} for cfg in (one, two, saving)
    ]
    states = "draft: float32 weights, gradients, two moments"
    assert parts[1][states] == pytest.approx(parts[0][states] / 2)
    (activations,) = [what for what in parts[0] if "activations of" in what and "draft" in what]
    assert parts[2][activations] < 0.7 * parts[0][activations]


def test_an_engine_takes_its_share_and_leaves_a_copy_on_the_host_while_it_sleeps() -> None:
    cfg = config()
    cfg.rollout.gpu_memory_utilization, cfg.rollout.enforce_eager = 0.5, True
    share, resident, host = engine_lines(cfg, SIZES, DEVICES["cuda"], 80.0)
    assert (share.device, resident.device) == (40.0, 1.0)
    assert host.host * GB == pytest.approx(1000 * 4 + 50 * 2)


def qwen3_4b() -> tuple[Config, Sizes]:
    """The 16-die layout of the public NPU run: 14 students, K = 7, blocks of 16 as that run
    replayed them, 186 anchors.
    """
    target = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )
    cfg = Config()
    cfg.data.max_prompt_length, cfg.data.max_response_length = 512, 4096
    (
        cfg.rollout.num_speculative_tokens,
        cfg.rollout.gpu_memory_utilization,
        cfg.rollout.enforce_eager,
    ) = 7, 0.4, False
    cfg.opd.max_response_anchors, cfg.opd.max_rejected_tokens = 186, 0
    cfg.opd.rejected_first_only = True
    cfg.trainer.n_student_workers = 14
    cfg.compute.lm_head_chunk_size = 512
    return cfg, sizes_of(cfg, target, QWEN3_4B_DFLASH)


def test_parameters_of_public_models_are_counted_right() -> None:
    _, sizes = qwen3_4b()
    assert sizes.target_params == pytest.approx(4.02e9, rel=0.01)
    assert sizes.draft_params == pytest.approx(0.54e9, rel=0.05)
    assert (sizes.features, sizes.block, sizes.width, sizes.kv) == (5, 16, 4096, 1024)


def test_the_engines_part_is_what_the_public_npu_run_read() -> None:
    """27 GB resident on a die of 61 GiB at 0.4, graphs included."""
    cfg, sizes = qwen3_4b()
    held = sum(line.device for line in engine_lines(cfg, sizes, DEVICES["npu"], 61 * 2**30 / GB))
    assert held == pytest.approx(27, rel=0.25)
    assert estimate(cfg, sizes, DEVICES["npu"], 61 * 2**30 / GB).host > 9


def test_teachers_are_counted_each_with_its_model() -> None:
    cfg = config()
    cfg.teacher.replicas, cfg.teacher.kv_cache_gb = 2, 1
    (math, code) = teacher_lines(cfg, DEVICES["cpu"], None, {"math": 10**9, "code": 2 * 10**9})
    assert code.device - math.device == pytest.approx(2 * 4.0)
    without, with_them = (
        estimate(cfg, SIZES, DEVICES["cpu"], None, lines).total for lines in ([], [math, code])
    )
    assert with_them - without == pytest.approx(math.device + code.device)
    (one,) = teacher_lines(cfg, DEVICES["cuda"], 80.0, {"default": 1})
    assert one.device == pytest.approx(0.5 * 80 + 1)


# Peak of the proportional set sizes of all processes of a run, sampled every 4 s on two cores, GB;
# each run once.
MEASURED = {
    "quickstart": ([], 13.1),
    "one worker, float32, larger batches and cache": (
        [
            "trainer.n_student_workers=1",
            "rollout.kv_cache_gb=2",
            "compute.max_tokens_per_micro_batch=8192",
            "compute.lm_head_chunk_size=1024",
            "compute.feature_cache_mb=0",
            "compute.param_dtype=float32",
            "sft.steps=1",
            "trainer.total_training_steps=2",
        ],
        8.0,
    ),
}


@pytest.mark.parametrize("case", MEASURED)
def test_estimates_are_within_a_quarter_of_what_was_measured(case: str) -> None:
    overrides, measured = MEASURED[case]
    cfg = load_config("quickstart", overrides)
    target = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    draft = get_family("dflash").derive_config(
        target, cfg.draft, cfg.rollout.num_speculative_tokens
    )
    assert estimate(cfg, sizes_of(cfg, target, draft), DEVICES["cpu"]).total == pytest.approx(
        measured, rel=0.25
    )
