"""Values that cannot work are errors before anything starts, with key, value and remedy."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest
from omegaconf import MISSING

from verl_opd.config.keys import rules
from verl_opd.config.load import load_config
from verl_opd.config.schema import Config
from verl_opd.config.validate import validate
from verl_opd.devices import DEVICES
from verl_opd.errors import ConfigError
from verl_opd.opd.losses import FULL_VOCABULARY, SINGLE_TOKEN
from verl_opd.opd.names import (
    BLOCK_LOSSES,
    ESTIMATORS,
    FULL_VOCABULARY_LOSSES,
    REJECTED_LOSSES,
    SCORED_LOSSES,
    TOP_K_LOSS,
)
from verl_opd.report.trackers import TRACKERS
from verl_opd.rollout.agent_loop import AGENT_LOOPS


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "train.jsonl").write_text('{"prompt": "hi"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"target:\n  path: {tmp_path}\ndata:\n  train_files: [{tmp_path}/train.jsonl]\n"
    )
    return str(path)


def _check(recipe: str, *overrides: str) -> None:
    validate(load_config(recipe, list(overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["draft.block_size=8"],
        ["draft.block_size=16", "draft.allow_block_size_mismatch=true"],
        ["rollout.max_model_len=1032"],
        ["rollout.engine_kwargs.tensor_parallel_size=1", "rollout.engine_kwargs.block_size=32"],
        ["trainer.n_student_workers=4", "rollout.agent.num_workers=8"],
        ["opd.loss_max_clamp=null", "opd.log_prob_min_clamp=null", "opd.rejected_stream_weight=0"],
        ["target.path=Qwen/Qwen3-4B", "draft.path=z-lab/Qwen3-4B-DFlash-b16"],
        ["optim.min_lr_ratio=0", "optim.lr_warmup_ratio=1", "trainer.total_training_steps=0"],
    ],
)
def test_what_works_passes(recipe: str, overrides: list[str]) -> None:
    _check(recipe, *overrides)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["opd.convention=upstream"], ["opd.convention='upstream'", "exact, draft_opd"]),
        (["rollout.agent.loop=tools"], ["rollout.agent.loop='tools'", "single_turn"]),
        (["opd.response_span=line"], ["opd.response_span='line'", "segment, block"]),
        (["opd.response_loss=mse"], ["opd.response_loss='mse'", "full_forward_kl"]),
        (["opd.response_loss=k1"], ["opd.response_loss=k1", "k3"]),
        (
            ["opd.response_loss=e2e_tv"],
            ["opd.response_loss=e2e_tv", "opd.rejected_stream_weight=1.0 must be 0"],
        ),
        (
            ["opd.policy_gradient=true"],
            ["opd.policy_gradient=true", "k1, k2, k3, abs", "opd.rejected_stream_weight=0"],
        ),
        (["opd.reward=a:b"], ["opd.reward=a:b", "opd.policy_gradient=true"]),
        (["opd.clip_ratio=0"], ["opd.clip_ratio=0", "greater than 0"]),
        (["opd.rejected_loss=tv"], ["opd.rejected_loss='tv'", "k3"]),
        (["sft.loss=mse"], ["sft.loss='mse'", "cross_entropy"]),
        (["target.dtype=int8"], ["target.dtype='int8'", "bfloat16"]),
        (["compute.param_dtype=float16"], ["compute.param_dtype='float16'", "float32"]),
        (["trainer.device=tpu"], ["trainer.device='tpu'", "npu"]),
        (["trainer.resume_mode=yes_please"], ["trainer.resume_mode='yes_please'", "disable"]),
        (["trainer.logger=[console,mlflow]"], ["trainer.logger='mlflow'", "tensorboard"]),
        (["rollout.num_speculative_tokens=0"], ["rollout.num_speculative_tokens=0", "at least 1"]),
        (["data.train_batch_size=0"], ["data.train_batch_size=0", "at least 1"]),
        (["data.seed=-1"], ["data.seed=-1", "negative"]),
        (["optim.lr=0"], ["optim.lr=0", "greater than 0"]),
        (["optim.lr=nan"], ["optim.lr=nan"]),
        (["rollout.top_p=0"], ["rollout.top_p=0", "(0, 1]"]),
        (["opd.rejected_position_decay=0"], ["opd.rejected_position_decay=0", "(0, 1]"]),
        (["opd.response_position_decay=1.1"], ["opd.response_position_decay=1.1", "(0, 1]"]),
        (["sft.position_decay=-0.5"], ["sft.position_decay=-0.5", "(0, 1]"]),
        (["optim.min_lr_ratio=2"], ["optim.min_lr_ratio=2", "[0, 1]"]),
        (["rollout.top_k=0"], ["rollout.top_k=0", "-1"]),
        (["trainer.save_freq=0"], ["trainer.save_freq=0", "-1"]),
        (["opd.log_prob_min_clamp=3"], ["opd.log_prob_min_clamp=3", "negative"]),
        (["optim.betas=[0.9]"], ["optim.betas=[0.9]", "two numbers"]),
        (["optim.betas=[0.9,1.0]"], ["optim.betas=[0.9, 1.0]"]),
        (["data.train_files=[]"], ["data.train_files=[]"]),
        (
            ["data.train_files=[nowhere/a.jsonl]"],
            ["data.train_files", "nowhere/a.jsonl", "does not exist"],
        ),
        (["data.val_files.gsm8k=b.jsonl"], ["data.val_files.gsm8k", "b.jsonl", "does not exist"]),
        (["target.path=/no/such/model"], ["target.path=/no/such/model", "does not exist"]),
        (["target.path=/no/cache/SmolLM2-135M-Instruct"], ["does not exist", "make quickstart"]),
        (["target.path=./model"], ["target.path=./model", "does not exist"]),
        (["draft.path=runs/a/b"], ["draft.path=runs/a/b", "does not exist"]),
        (
            ["rollout.num_speculative_tokens=8", "draft.block_size=8"],
            ["num_speculative_tokens=8", "block_size=8", "at most 7"],
        ),
        (
            [
                "rollout.num_speculative_tokens=8",
                "draft.block_size=8",
                "draft.allow_block_size_mismatch=true",
            ],
            ["num_speculative_tokens=8", "block_size=8", "at most 7"],
        ),
        (
            ["draft.block_size=16"],
            [
                "draft.block_size=16",
                "num_speculative_tokens=7",
                "draft.allow_block_size_mismatch=true",
            ],
        ),
        (["draft.target_layer_ids=[3,1]"], ["draft.target_layer_ids=[3, 1]", "ascending"]),
        (["draft.target_layer_ids=[]"], ["draft.target_layer_ids=[]"]),
        (["draft.target_layer_ids=[-1,3]"], ["draft.target_layer_ids=[-1, 3]"]),
        (
            ["rollout.agent.num_workers=5"],
            ["data.train_batch_size=16", "rollout.agent.num_workers=5", "15 or 20", "is 4"],
        ),
        (
            ["trainer.n_student_workers=3"],
            ["data.train_batch_size=16", "trainer.n_student_workers=3", "15 or 18", "is 2"],
        ),
        (
            ["data.train_batch_size=4", "rollout.agent.num_workers=8"],
            ["=4", "=8", "sizes are 8", "is 4"],
        ),
        (
            ["trainer.n_student_workers=4", "trainer.nnodes=3"],
            ["trainer.n_student_workers=4", "trainer.nnodes=3"],
        ),
        (["rollout.engine_kwargs.model=x"], ["rollout.engine_kwargs.model='x'", "target.path"]),
        (
            ["rollout.engine_kwargs.speculative_config={a: 1}"],
            ["rollout.engine_kwargs.speculative_config"],
        ),
        (
            ["rollout.engine_kwargs.worker_extension_cls=a.B"],
            ["rollout.engine_kwargs.worker_extension_cls='a.B'"],
        ),
        (
            ["rollout.engine_kwargs.max_model_len=99"],
            ["rollout.engine_kwargs.max_model_len=99", "rollout.max_model_len"],
        ),
        (
            ["rollout.engine_kwargs.tensor_parallel_size=2"],
            ["tensor_parallel_size=2", "one engine", "trainer.n_student_workers"],
        ),
        (["rollout.engine_kwargs.load_format=dummy"], ["load_format='dummy'", "random weights"]),
        (["rollout.max_model_len=1031"], ["rollout.max_model_len=1031", "= 1032"]),
        (
            ["opd.response_stream_weight=0", "opd.rejected_stream_weight=0"],
            ["opd.response_stream_weight=0", "opd.rejected_stream_weight=0"],
        ),
        (["trainer.resume_mode=path"], ["trainer.resume_mode=path", "trainer.resume_from_path"]),
        (
            ["trainer.resume_mode=path", "trainer.resume_from_path=/no/where"],
            ["trainer.resume_from_path=/no/where"],
        ),
        (
            ["trainer.experiment_name='../../etc'"],
            ["trainer.experiment_name='../../etc' becomes a folder name"],
        ),
        (["trainer.project_name='..'"], ["trainer.project_name='..' becomes a folder name"]),
        (
            ["trainer.resume_from_path=/tmp"],
            ["trainer.resume_from_path=/tmp", "trainer.resume_mode=auto"],
        ),
    ],
)
def test_what_cannot_work_is_an_error(recipe: str, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(recipe, *overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text


def test_a_model_path_that_is_a_file(recipe: str) -> None:
    with pytest.raises(ConfigError, match="is a file"):
        _check(recipe, f"target.path={recipe}")


def test_choices_are_those_of_the_code_that_reads_them() -> None:
    choices = {key: rule.choices for key, rule in rules().items() if rule.choices}
    on_text = {"cross_entropy", *SINGLE_TOKEN, *FULL_VOCABULARY, *BLOCK_LOSSES}
    assert set(choices["sft.loss"]) == on_text, "no server scores the text of supervised steps"
    assert set(choices["opd.response_loss"]) == {*on_text, TOP_K_LOSS}
    assert set(choices["opd.rejected_loss"]) == set(SINGLE_TOKEN)
    assert set(choices["rollout.agent.loop"]) == set(AGENT_LOOPS)
    assert choices["trainer.logger"] == TRACKERS
    assert set(choices["trainer.device"]) == {"auto", *DEVICES}


def test_every_name_of_a_loss_has_its_function_and_the_reverse() -> None:
    assert set(REJECTED_LOSSES) == set(SCORED_LOSSES) == set(SINGLE_TOKEN)
    assert set(ESTIMATORS) == set(SINGLE_TOKEN) - {"forward_kl"}
    assert set(FULL_VOCABULARY_LOSSES) == set(FULL_VOCABULARY)


def test_defaults_keep_their_rules() -> None:
    cfg = Config()
    for key, rule in rules().items():
        value = reduce(getattr, key.split("."), cfg)
        assert value == MISSING or rule.broken_by(value) == "", key
