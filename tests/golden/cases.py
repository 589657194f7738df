"""What the golden files are made of: cases and inputs as plain data, without any import of ours.

Keys are those of the day of the recording; build.py translates keys that were renamed since.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PROPOSALS = 3  # drafted per verify step
TOKENS = range(1, 90)  # of prompts and responses; the tiny target has 97
MASK_TOKEN = 96
LAYERS = [1, 3, 5]
FAMILIES = ("dflash", "eagle3", "dspark")
CONVENTIONS = ("exact", "draft_opd")
# (accepted, drafted tokens, log-probs of the rejected ones); (0, [], []): a step without a draft
Event = tuple[int, list[int], list[float]]

BASE: dict[str, Any] = {
    "target.dtype": "float32",
    "draft.init_std": 0.2,
    "draft.target_layer_ids": LAYERS,
    "data.train_batch_size": 4,
    "data.max_response_length": 24,
    "rollout.num_speculative_tokens": PROPOSALS,
    "opd.max_replay_mismatch": None,  # the traces are made up: no draft proposed them
    "opd.max_replay_mismatch_raw": None,
    "warmup.samples_per_update": 4,
    "warmup.anchors_per_sample": 4,
    "optim.lr": 1e-3,
    "training.param_dtype": "float32",
    "training.lm_head_chunk_size": 5,
    "trainer.seed": 7,  # not that of the data
    "trainer.val_before_train": False,
    "trainer.save_freq": -1,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "dflash": {"draft.num_hidden_layers": 2, "draft.mask_token_id": MASK_TOKEN},
    "eagle3": {},
    "dspark": {"draft.num_hidden_layers": 2, "draft.mask_token_id": MASK_TOKEN},
}


@dataclass(frozen=True)
class Case:
    """A run of 20 optimiser steps.

    supervised, on_policy: steps of the two stages. given: the first one learns from given
    conversations instead of text that the target wrote. proposable: the draft's vocabulary; empty:
    the target's. teacher: likeliest tokens that a server reports beside its scores; None: no
    server. reward: a task reward is mixed in. held_out: there is a benchmark.
    """

    family: str
    supervised: int = 0
    on_policy: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    given: bool = True
    proposable: tuple[int, ...] = ()
    teacher: int | None = None
    reward: bool = False
    held_out: bool = False

    @property
    def all_settings(self) -> dict[str, Any]:
        stages = {
            "draft.family": self.family,
            "trainer.warmup_steps": self.supervised,
            "trainer.total_training_steps": self.on_policy,
        }
        return {**BASE, **OF_FAMILY[self.family], **stages, **self.settings}


def _grid() -> dict[str, Case]:
    cases = {}
    for family in FAMILIES:
        for convention in CONVENTIONS:
            name, settings = f"{family}-{convention}", {"opd.convention": convention}
            cases[f"{name}-supervised"] = Case(family, supervised=20, settings=settings)
            cases[f"{name}-on_policy"] = Case(family, on_policy=20, settings=settings)
    return cases


CASES: dict[str, Case] = {
    **_grid(),
    "dflash-own_text": Case(
        "dflash",
        supervised=10,
        given=False,
        settings={"warmup.updates_per_step": 2, "warmup.loss": "forward_kl", "warmup.lr": 2e-3},
    ),
    "eagle3-own_text": Case(
        "eagle3", supervised=20, given=False, settings={"warmup.loss": "full_forward_kl"}
    ),
    "dflash-full_forward_kl": Case(
        "dflash",
        on_policy=20,
        settings={
            "opd.response_loss": "full_forward_kl",
            "opd.rejected_loss": "k2",
            "opd.rejected_stream_weight": 0.5,
            "rollout.temperature": 0.7,
        },
    ),
    "eagle3-lk_lambda": Case("eagle3", on_policy=20, settings={"opd.response_loss": "lk_lambda"}),
    "dspark-tv": Case(
        "dspark",
        on_policy=20,
        settings={"opd.response_loss": "tv", "opd.response_position_decay": 0.7},
    ),
    "dflash-e2e_tv": Case(
        "dflash",
        on_policy=20,
        settings={"opd.response_loss": "e2e_tv", "opd.rejected_stream_weight": 0.0},
    ),
    "dflash-top_k": Case(
        "dflash", on_policy=20, teacher=5, settings={"opd.response_loss": "forward_kl_topk"}
    ),
    "dflash-teacher_server": Case("dflash", on_policy=20, teacher=0),
    "dflash-policy_gradient": Case(
        "dflash",
        on_policy=10,
        reward=True,
        settings={
            "opd.response_loss": "k1",
            "opd.policy_gradient": True,
            "opd.reward_weight": 0.5,
            "opd.clip_ratio": 0.05,
            "trainer.update_epochs": 2,
        },
    ),
    "dspark-confidence": Case(
        "dspark",
        on_policy=20,
        settings={"draft.confidence_head": True, "opd.confidence_weight": 0.5},
    ),
    "eagle3-vocabulary": Case(
        "eagle3", supervised=8, on_policy=12, proposable=tuple(range(2, 90, 3))
    ),
    "eagle3-vocabulary_top_k": Case(
        "eagle3",
        on_policy=20,
        teacher=4,
        proposable=tuple(range(2, 90, 3)),
        settings={"opd.response_loss": "forward_kl_topk"},
    ),
    "dflash-anchors": Case(
        "dflash",
        on_policy=20,
        settings={
            "opd.response_span": "block",
            "opd.response_anchor_stride": 2,
            "opd.max_response_anchors": 3,
            "opd.max_rejected_tokens": 5,
            "opd.rejected_loss": "forward_kl",
        },
    ),
    "eagle3-block_span": Case(
        "eagle3",
        on_policy=20,
        settings={"opd.response_span": "block", "opd.response_position_decay": 0.9},
    ),
    "dflash-random_anchors": Case(
        "dflash",
        on_policy=20,
        settings={
            "opd.convention": "draft_opd",
            "opd.random_anchors": True,
            "opd.rejected_first_only": True,
            "opd.loss_max_clamp": 2.0,
            "opd.log_prob_min_clamp": -4.0,
        },
    ),
    "dflash-schedule": Case(  # both stages, with the settings of the recipe quickstart
        "dflash",
        supervised=8,
        on_policy=6,
        settings={
            "warmup.position_decay": 0.7,
            "warmup.lr": 2e-3,
            "opd.response_span": "block",
            "opd.response_loss": "cross_entropy",
            "opd.response_position_decay": 0.7,
            "opd.rejected_stream_weight": 0.1,
            "opd.rejected_position_decay": 0.5,
            "opd.loss_max_clamp": None,
            "optim.lr_warmup_ratio": 0.25,
            "optim.min_lr_ratio": 0.1,
            "optim.grad_clip": 0.5,
            "optim.weight_decay": 0.1,
            "trainer.updates_per_step": 2,
        },
    ),
    "dflash-execution": Case(  # what must not change a result, and the loop's own intervals
        "dflash",
        on_policy=40,
        held_out=True,
        settings={
            "training.max_tokens_per_micro_batch": 60,
            "training.gradient_checkpointing": True,
            "training.feature_cache_mb": 16,
            "trainer.update_accumulation_steps": 2,
            "trainer.test_freq": 10,
            "trainer.save_freq": 10,
        },
    ),
}


@dataclass(frozen=True)
class Text:
    """A made-up response; `events`: how it was drafted; `generated`: marks of given text."""

    response: list[int]
    events: list[Event]
    generated: list[bool] | None = None


def make_prompt(row: int) -> list[int]:
    rng = random.Random(f"prompt {row}")
    return [rng.choice(TOKENS) for _ in range(rng.randrange(3, 8))]


def make_text(call: int, index: int, drafting: bool, proposable: Sequence[int] = ()) -> Text:
    """Response `index` of rollout `call`: steps that accept any number, cut anywhere at the end."""
    rng = random.Random(f"text {call} {index}")
    length = rng.randrange(8, 25)
    response, events = [rng.choice(TOKENS)], list[Event]()
    while len(response) < length:
        if not drafting or rng.random() < 0.08:
            events.append((0, [], []))
            response.append(rng.choice(TOKENS))
            continue
        accepted = rng.randrange(PROPOSALS + 1)
        drafted = [rng.choice(proposable or TOKENS) for _ in range(PROPOSALS)]
        left = [token for token in TOKENS if drafted[accepted : accepted + 1] != [token]]
        rejected = [-round(rng.uniform(0.5, 8.0), 3) for _ in range(PROPOSALS - accepted)]
        events.append((accepted, drafted, rejected))
        response += [*drafted[:accepted], rng.choice(left)]
    return Text(response[:length], events)


def make_conversation(row: int) -> Text:
    """Given text in which turns that were not generated lie between generated ones."""
    rng = random.Random(f"conversation {row}")
    generated = list[bool]()
    for turn in range(5):
        generated += [turn % 2 == 0] * rng.randrange(2, 8)
    return Text([rng.choice(TOKENS) for _ in generated], [], generated)


def make_scores(
    call: int, index: int, length: int, top: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """A server's log-probs of the response, and its `top` likeliest tokens with theirs."""
    rng = random.Random(f"scores {call} {index}")
    own = [-round(rng.uniform(0.05, 6.0), 3) for _ in range(length)]
    ids = [rng.sample(TOKENS, top) for _ in range(length)]
    best = [sorted((-round(rng.uniform(1.5, 6), 3) for _ in row), reverse=True) for row in ids]
    return own, ids, best


def reward(prompt: tuple[int, ...], response: tuple[int, ...], source: str) -> float:
    return (sum(response) + len(prompt)) % 7 / 7 + len(source) / 100


# name -> (events, response length)
TRACES: dict[str, tuple[list[Event], int]] = {
    "worked_example": (
        [
            (1, [11, 902, 903], [-2.5, -3.5]),
            (3, [13, 14, 15], []),
            (0, [931, 932, 933], [-4.0, -5.0, -6.0]),
        ],
        8,
    ),
    "no_verify_step": ([], 1),
    "empty_response": ([], 0),
    "draft_free_only": ([(0, [], []), (0, [], [])], 3),
    "draft_free_between": (
        [(1, [5, 6], [-1.25]), (0, [], []), (0, [7, 8], [-0.5, -9.0]), (0, [], [])],
        6,
    ),
    "rejected_first_and_suffix": (
        [(0, [21, 22, 23], [-0.1, -0.2, -30.0]), (2, [24, 25, 26], [-1.5])],
        5,
    ),
    "end_inside_accepted_prefix": ([(1, [31, 32, 33], [-1.0, -2.0]), (3, [34, 35, 36], [])], 5),
    "end_at_last_accepted": ([(2, [41, 42, 43], [-7.0])], 3),
    "end_at_correction": ([(1, [51, 52, 53], [-3.0, -4.0])], 3),
    "end_right_before_correction": ([(1, [51, 52, 53], [-3.0, -4.0])], 2),
    "steps_past_the_end": ([(0, [61], [-1.0]), (1, [62], []), (0, [63], [-2.0])], 2),
    "unequal_blocks": ([(1, [71], []), (2, [72, 73, 74, 75], [-1.0, -2.0]), (0, [76], [-3.0])], 7),
}
# what is done to the fields of the worked example -> they are an error
BROKEN_FIELDS: dict[str, dict[str, Any]] = {
    "a_field_is_missing": {"dflash_draft_free_token_indices": None},
    "an_anchor_is_missing": {"dflash_replay_block_anchor_indices": [0, 2]},
    "an_offset_is_missing": {"dflash_rejected_draft_offsets": [2, 3, 1, 2]},
    "a_token_is_missing": {"dflash_replay_block_drafted_token_ids": [11, 902, 903, 13, 14]},
    "a_logprob_is_missing": {"dflash_replay_block_refused_logprobs": [-2.5, -3.5]},
    "more_accepted_than_drafted": {"dflash_replay_block_accepted_lengths": [1, 3, 4]},
}
