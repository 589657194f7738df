"""Symptoms of a run that trains on nothing: each is reported once, with what is known."""

from __future__ import annotations

import pytest

from verl_opd.report.diagnosis import SYMPTOMS, Diagnosis, checklist

HEALTHY = {
    "opd/rollout/accept_length/mean": 1.8,
    "opd/rollout/empty_reject_ratio": 0.0,
    "actor/distillation/loss": 0.7,
    "response_length/clip_ratio": 0.5,
}


def test_a_healthy_run_says_nothing() -> None:
    diagnosis = Diagnosis()
    assert [diagnosis.look(HEALTHY) for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize(
    ("symptom", "change"),
    [
        ("no_verify_steps", {"opd/rollout/empty_reject_ratio": 1.0}),
        ("zero_loss", {"actor/distillation/loss": 0.0}),
        ("all_clipped", {"response_length/clip_ratio": 1.0}),
    ],
)
def test_a_symptom_is_reported_once(symptom: str, change: dict[str, float]) -> None:
    diagnosis = Diagnosis()
    assert diagnosis.look(HEALTHY) == []
    assert diagnosis.look({**HEALTHY, **change}) == [symptom]
    assert diagnosis.look({**HEALTHY, **change}) == []


def test_a_useless_draft_is_reported_after_five_steps_in_a_row() -> None:
    diagnosis, useless = Diagnosis(), {**HEALTHY, "opd/rollout/accept_length/mean": 1.02}
    assert [diagnosis.look(useless) for _ in range(4)] == [[]] * 4
    assert diagnosis.look(HEALTHY) == []
    assert [diagnosis.look(useless) for _ in range(5)] == [[], [], [], [], ["useless_draft"]]


def test_skipping_every_update_is_reported_after_five_steps_in_a_row() -> None:
    diagnosis, skipped = Diagnosis(), {"actor/updates": 16.0, "actor/skipped_steps": 16.0}
    assert [diagnosis.look(skipped) for _ in range(4)] == [[]] * 4
    assert diagnosis.look({"actor/updates": 16.0, "actor/skipped_steps": 15.0}) == []
    assert [diagnosis.look(skipped) for _ in range(5)][-1] == ["all_skipped"]


def test_a_step_without_measurements_is_not_a_symptom() -> None:
    assert Diagnosis().look({}) == []


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_checklist_shows_what_is_known(name: str) -> None:
    text = checklist(
        name,
        {"opd/weight_sync/version": 7.0, "training/update_step": 8.0},
        {"mask_token_id": 3, "LM head": "the target's"},
    )
    assert text.startswith("diagnosis: ")
    assert "  1. " in text
    for fact in (
        "opd/weight_sync/version: 7",
        "training/update_step: 8",
        "mask_token_id: 3",
        "LM head: the target's",
    ):
        assert fact in text
