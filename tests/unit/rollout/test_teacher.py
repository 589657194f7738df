"""Teacher servers without an engine: which source is chosen, how scores are read, routed and turned
into a loss.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.drafts import target_config
from tests.options import varied
from tests.tiny import tiny_tokenizer
from tests.training import LR, SPEC, make_items, make_trainer, totals_of
from tests.unit.engines.test_settings import settings
from tests.unit.rollout.test_agent_loop import FakeServer, Remote
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.data.prompts import Prompt, load_prompts
from verl_opd.errors import ConfigError, RolloutError
from verl_opd.opd.layout import build_layout
from verl_opd.opd.losses import full_forward_kl, topk_forward_kl
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.trace import TeacherScores
from verl_opd.rollout.agent_loop import AgentLoopWorker, SampleFailure
from verl_opd.rollout.router import Router
from verl_opd.rollout.teacher import (
    Teachers,
    TeacherServer,
    TeacherSettings,
    scores_from_prompt_logprobs,
)
from verl_opd.training.lm_head import own_row_loss, row_loss

# -- which source ----------------------------------------------------------------------------------


def configured(
    loss: str = "forward_kl",
    source: str = "auto",
    models: dict[str, str] | None = None,
    temperature: float = 0.0,
) -> Config:
    cfg = Config()
    cfg.target.path = "/models/target"
    cfg.opd.response_loss, cfg.rollout.temperature = loss, temperature
    cfg.teacher.source, cfg.teacher.models = source, models or {}
    return cfg


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (configured(), {}),
        (configured(models={"a": "/models/../models/target"}), {}),
        (configured("full_forward_kl"), {}),
        (configured(source="composed"), {}),
        (configured(source="server"), {"default": "/models/target"}),
        (configured("forward_kl_topk"), {"default": "/models/target"}),
        (
            configured(models={"a": "/models/target", "b": "/models/other"}),
            {"a": "/models/target", "b": "/models/other"},
        ),
        (configured("k3", temperature=1.0, source="server"), {"default": "/models/target"}),
    ],
)
def test_the_source_is_decided_once_from_the_configuration(cfg: Config, expected: dict[str, str]):
    assert teacher_models(cfg) == expected


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            configured("forward_kl_topk", source="composed"),
            "use teacher.source=server, or opd.response_loss=full_forward_kl",
        ),
        (
            configured(source="composed", models={"b": "/models/other"}),
            "does not work with teacher.models={'b': '/models/other'}",
        ),
        (
            configured("cross_entropy", source="server"),
            "not enough for opd.response_loss=cross_entropy",
        ),
        (configured("tv", models={"b": "/models/other"}), "not enough for opd.response_loss=tv"),
        (configured(source="server", temperature=0.6), "rollout.temperature=0.6"),
    ],
)
def test_what_no_teacher_supports_is_an_error(cfg: Config, message: str):
    with pytest.raises(ConfigError, match=message.replace("{", "\\{")):
        teacher_models(cfg)


def test_a_row_that_names_no_teacher_is_an_error_with_its_place(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "domain": "math"}\n{"prompt": "b", "domain": "law"}\n')

    def load(teachers: list[str]) -> list[Prompt]:
        tokenizer = tiny_tokenizer()
        return load_prompts(
            [file], tokenizer, max_prompt_length=64, teacher_key="domain", teachers=teachers
        )[0]

    assert [prompt.teacher_key for prompt in load(["only"])] == ["math", "law"]
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2: domain='law' is not one of the teachers math, code"
    ):
        load(["math", "code"])


# -- reading and routing ---------------------------------------------------------------------------


def flat(rows: list[list[tuple[int, float]]]) -> Any:
    """vLLM's FlatLogprobs from (token, log-prob) pairs per position."""
    ends = np.cumsum([len(row) for row in rows]).tolist()
    starts = [end - len(row) for end, row in zip(ends, rows, strict=True)]
    token_ids, logprobs = [t for row in rows for t, _ in row], [v for row in rows for _, v in row]

    class Flat(SimpleNamespace):
        def __len__(self) -> int:
            return len(rows)

    return Flat(start_indices=starts, end_indices=ends, token_ids=token_ids, logprobs=logprobs)


ROWS = [
    [],
    [(8, -3.0), (5, -0.1), (6, -2.0)],
    [(5, -0.5), (5, -0.5), (7, -1.5)],
    [(9, -4.0), (1, -0.2), (2, -2.5)],
]


def test_prompt_logprobs_become_scores_of_the_response():
    scores = scores_from_prompt_logprobs(flat(ROWS), prompt_len=2, response_ids=[5, 9], top_k=2)
    assert scores.logprobs.tolist() == pytest.approx([-0.5, -4.0])
    assert scores.top_ids.tolist() == [[5, 7], [1, 2]]
    assert scores.top_logprobs.tolist() == [
        pytest.approx([-0.5, -1.5]),
        pytest.approx([-0.2, -2.5]),
    ]


@pytest.mark.parametrize(
    ("rows", "prompt_len", "response", "top_k"),
    [(ROWS, 2, [9, 5], 2), (ROWS, 1, [8, 5], 2), (ROWS, 2, [5, 9], 3), (ROWS[:3], 2, [5, 9], 2)],
    ids=["other tokens", "shifted by one", "too few tokens", "a row is missing"],
)
def test_scores_of_another_response_are_an_error(
    rows: Any, prompt_len: int, response: list[int], top_k: int
):
    with pytest.raises(ValueError, match=r"log-prob rows"):
        scores_from_prompt_logprobs(flat(rows), prompt_len, response, top_k)


class FakeTeacher:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def score(self, request_id: str, prompt_ids: Any, response_ids: Any) -> TeacherScores:
        self.seen.append(request_id)
        await asyncio.sleep(0.001)
        return TeacherScores(
            np.zeros(1, np.float32), np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)
        )


def test_samples_go_to_the_teacher_their_key_names_spread_over_its_replicas():
    math_teachers, code = [FakeTeacher(), FakeTeacher()], FakeTeacher()
    teachers = Teachers(
        {"math": [Remote(server) for server in math_teachers], "code": [Remote(code)]}, timeout=5.0
    )

    async def all_at_once() -> None:
        keys = ["math"] * 4 + ["code"]
        await asyncio.gather(
            *(teachers.score(str(i), key, (1,), (2,)) for i, key in enumerate(keys))
        )
        with pytest.raises(RolloutError, match="unknown teacher 'law'; known are math, code"):
            await teachers.score("x", "law", (1,), (2,))

    asyncio.run(all_at_once())
    assert [len(server.seen) for server in math_teachers] == [2, 2]
    assert code.seen == ["4"]


def test_a_single_teacher_takes_every_sample_whatever_its_key():
    server = FakeTeacher()
    asyncio.run(Teachers({"default": [Remote(server)]}, 5.0).score("0-1", "anything", (1,), (2,)))
    assert server.seen == ["0-1"]


def test_a_teacher_that_hangs_is_named():
    class Hanging(FakeTeacher):
        async def score(self, *args: Any) -> TeacherScores:
            await asyncio.sleep(30)
            raise AssertionError

    with pytest.raises(
        RolloutError,
        match=r"teacher default, replica 0: no scores within rollout.request_timeout=0.05 s",
    ):
        asyncio.run(Teachers({"default": [Remote(Hanging())]}, 0.05).score("0-1", "x", (1,), (2,)))


async def hang(*_: Any) -> Any:
    await asyncio.sleep(30)
    yield


def test_a_teacher_that_computes_no_token_is_noticed_long_before_the_request_times_out():
    """The core hangs; the server itself still answers."""

    async def scenario() -> None:
        stalled = settings(speculation=None, stall_timeout=0.2)
        server = TeacherServer(TeacherSettings("math", stalled))
        assert await server.failure() == "it did not start"
        server._engine.llm = SimpleNamespace(errored=False, generate=hang)
        assert await server.failure() == ""
        with pytest.raises(
            RolloutError, match="request 0-1: the engine hangs, no token for any request"
        ):
            await server.score("0-1", (1, 2), (3,))
        assert "rollout.stall_timeout=0.2 s" in await server.failure()

    asyncio.run(scenario())


def test_a_teacher_whose_core_dies_ends_its_requests():
    async def scenario() -> None:
        server = TeacherServer(TeacherSettings("math", settings(speculation=None)))
        core = SimpleNamespace(errored=False, dead_error=RuntimeError(), generate=hang)
        server._engine.llm = core
        waiting = asyncio.ensure_future(server.score("0-1", (1, 2), (3,)))
        await asyncio.sleep(0.05)
        core.errored = True
        with pytest.raises(RolloutError, match="request 0-1: the engine core died"):
            await asyncio.wait_for(waiting, 10)
        assert await server.failure() == "RuntimeError: its engine core died"

    asyncio.run(scenario())


class LostTeacher(FakeTeacher):
    async def score(self, *args: Any) -> TeacherScores:
        raise RolloutError("request 0-0: the engine core died")


def test_agent_loops_send_requests_to_the_teacher_that_replaced_a_lost_one():
    servers = {"math": [Remote(FakeTeacher()), Remote(LostTeacher())]}
    new = FakeTeacher()
    router = Remote(Router(1))
    worker = AgentLoopWorker("single_turn", [Remote(FakeServer())], router, 8, 5.0, servers)
    rows = [Prompt(f"0-{i}", "unit", (i, 7), ()) for i in range(4)]

    async def scenario() -> None:
        first = await worker.run(rows, {}, 0, True)
        lost = [outcome for outcome in first if isinstance(outcome, SampleFailure)]
        assert 0 < len(lost) < 4, "samples of the other replica are kept"
        await worker.replace_teacher("math", 1, Remote(new))
        second = await worker.run(rows, {}, 0, True)
        assert all(outcome.teacher is not None for outcome in second)
        assert new.seen

    asyncio.run(scenario())


# -- the loss --------------------------------------------------------------------------------------


def test_top_k_forward_kl_and_its_gradient_equal_float64_by_hand():
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, 9), torch.randn(5, 9)
    log_p = torch.log_softmax(teacher.double(), -1)
    top, ids = log_p.topk(3)
    double = logits.double().requires_grad_()
    expected = (top.exp() * (top - torch.log_softmax(double, -1).gather(1, ids))).sum(-1)
    expected.clamp(min=0).sum().backward()
    ours = logits.clone().requires_grad_()
    values, mass = topk_forward_kl(ours, ids, top.float())
    values.sum().backward()
    torch.testing.assert_close(values.double(), expected.clamp(min=0))
    torch.testing.assert_close(mass.double(), double.softmax(-1).gather(1, ids).sum(-1).detach())
    torch.testing.assert_close(ours.grad.double(), double.grad, rtol=1e-4, atol=1e-6)


def test_with_every_token_it_is_the_full_forward_kl():
    torch.manual_seed(1)
    logits, teacher = torch.randn(4, 7), torch.randn(4, 7)
    top, ids = torch.log_softmax(teacher, -1).topk(7)
    torch.testing.assert_close(
        topk_forward_kl(logits, ids, top)[0], full_forward_kl(logits, teacher)
    )


def test_tokens_that_the_draft_cannot_propose_are_left_out_and_clamps_hold():
    logits = torch.tensor([[math.log(3.0), 0.0, 0.0]])  # q = 0.6, 0.2, 0.2
    top = torch.tensor([[0.5, 0.25, 1e-9]]).log()
    values, mass = topk_forward_kl(logits, torch.tensor([[1, -1, 0]]), top, min_clamp=-1.2)
    first = 0.5 * (math.log(0.5) + 1.2)  # log 0.2 lies below the clamp
    last = math.exp(-1.2) * (-1.2 - math.log(0.6))  # log 1e-9 does
    assert values.item() == pytest.approx(first + last, rel=1e-5)
    assert mass.item() == pytest.approx(0.2 + 0.6)


def test_impossible_tokens_of_the_teacher_cost_nothing():
    logits = torch.zeros(1, 3, requires_grad=True)
    values, _ = topk_forward_kl(logits, torch.tensor([[0, 1]]), torch.tensor([[0.0, -math.inf]]))
    values.sum().backward()
    assert values.item() == pytest.approx(math.log(3), rel=1e-6)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("chunk", [2, 100])
def test_chunks_and_either_kind_of_head_give_the_same(chunk: int):
    torch.manual_seed(2)
    rows, weight = torch.randn(5, 4), torch.randn(9, 4)
    top, ids = torch.log_softmax(torch.randn(5, 9), -1).topk(3)

    def loss(logits: Tensor, ids: Tensor, top: Tensor) -> Tensor:
        return torch.stack(topk_forward_kl(logits, ids, top), 1)

    plain = rows.clone().requires_grad_()
    expected, expected_mass = topk_forward_kl(plain @ weight.T, ids, top)
    expected.sum().backward()
    for scored in (row_loss, own_row_loss):
        ours = rows.clone().requires_grad_()
        values, mass = scored(ours, weight, loss, chunk, ids, top).unbind(1)
        values.sum().backward()
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(mass, expected_mass)
        torch.testing.assert_close(ours.grad, plain.grad)


# -- the training step -----------------------------------------------------------------------------


def scored(items: list[TrainItem], models: Path, k: int) -> list[TrainItem]:
    """`items` with the scores a server would give, in plain transformers."""
    target = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    result = []
    for item in items:
        ids = torch.tensor([item.prompt_ids + item.response_ids])
        with torch.no_grad():
            log_p = torch.log_softmax(target(ids).logits[0].double(), -1)[
                len(item.prompt_ids) - 1 : -1
            ]
        own = log_p.gather(1, ids[0, len(item.prompt_ids) :, None]).squeeze(1)
        top, top_ids = log_p.topk(k)
        scores = TeacherScores(own.float().numpy(), top_ids.int().numpy(), top.float().numpy())
        result.append(replace(item, teacher=scores))
    return result


def test_layout_takes_the_scores_at_each_label(models: Path):
    items = scored(make_items(), models, 2)
    layout = build_layout(items)
    entries = [
        (item, item.plan.anchors[block] + offset)
        for item in items
        for block, offset in zip(item.plan.response_block, item.plan.response_offset, strict=True)
    ]
    assert layout.response.teacher_logprob.tolist() == [
        float(item.teacher.logprobs[position]) for item, position in entries
    ]
    assert layout.teacher_top.ids.tolist() == [
        item.teacher.top_ids[position].tolist() for item, position in entries
    ]


def test_a_sample_without_scores_among_scored_ones_is_an_error(models: Path):
    items = scored(make_items(), models, 0)
    with pytest.raises(
        ValueError, match="sample b: teacher scores of 0 tokens for a response of 14"
    ):
        build_layout([items[0], replace(items[1], teacher=None)])


@pytest.mark.parametrize("loss", ["forward_kl", "k2", "abs"])
def test_server_scores_and_the_trainers_target_give_the_same_update(
    models: Path, one_rank: None, loss: str
):
    """Section 12.4 of the acceptance checklist: composed and server teacher agree
    on the same text.
    """
    spec, items = varied(SPEC, response_loss=loss), make_items()
    composed, served = make_trainer(models), make_trainer(models)
    ours = composed.update(items, totals_of(items, spec), spec, LR).finish()
    theirs = served.update(scored(items, models, 0), totals_of(items, spec), spec, LR).finish()
    assert theirs["actor/distillation/loss"] == pytest.approx(
        ours["actor/distillation/loss"], rel=1e-5
    )
    for name, gradient in composed.gradients.items():
        torch.testing.assert_close(served.gradients[name], gradient, rtol=1e-3, atol=1e-5)


def test_another_teacher_changes_the_update(models: Path, one_rank: None):
    """A server's scores are really used: half as likely labels give another loss."""
    items = scored(make_items(), models, 0)
    changed = [
        replace(item, teacher=replace(item.teacher, logprobs=item.teacher.logprobs - math.log(2)))
        for item in items
    ]
    losses = [
        make_trainer(models)
        .update(part, totals_of(part), SPEC, LR)
        .finish()["actor/distillation/loss"]
        for part in (items, changed)
    ]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_top_k_of_all_tokens_trains_like_the_full_vocabulary(models: Path, one_rank: None):
    vocab = target_config(LlamaConfig).vocab_size
    spec = varied(
        SPEC, response_loss="forward_kl_topk", log_prob_min_clamp=None, loss_max_clamp=None
    )
    full = varied(spec, response_loss="full_forward_kl")
    items = make_items()
    by_server, composed = make_trainer(models), make_trainer(models)
    served = by_server.update(
        scored(items, models, vocab), totals_of(items, spec), spec, LR
    ).finish()
    plain = composed.update(items, totals_of(items, full), full, LR).finish()
    assert served["actor/distillation/loss"] == pytest.approx(
        plain["actor/distillation/loss"], rel=1e-4
    )
    assert served["actor/distillation/student_mass"] == pytest.approx(1.0, abs=1e-4)
    assert served["actor/distillation/teacher_mass_min"] == pytest.approx(1.0, abs=1e-4)
    for name, gradient in composed.gradients.items():
        torch.testing.assert_close(by_server.gradients[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 60])
def test_top_k_does_not_depend_on_the_micro_batches(models: Path, one_rank: None, budget: int):
    spec, items = varied(SPEC, response_loss="forward_kl_topk"), scored(make_items(), models, 4)
    one, many = make_trainer(models), make_trainer(models, max_tokens_per_micro_batch=budget)
    results = [
        trainer.update(items, totals_of(items, spec), spec, LR).finish() for trainer in (one, many)
    ]
    assert results[1]["actor/distillation/loss"] == pytest.approx(
        results[0]["actor/distillation/loss"], rel=1e-5
    )
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(many.gradients[name], gradient, rtol=1e-3, atol=1e-5)
