"""Every name of a loss has a formula, and every formula a name."""

from __future__ import annotations

from verl_opd.opd.losses import FULL_VOCABULARY, SINGLE_TOKEN
from verl_opd.opd.names import (
    BLOCK_LOSSES,
    FULL_VOCABULARY_LOSSES,
    REJECTED_LOSSES,
    RESPONSE_LOSSES,
    SCORED_LOSSES,
    TOP_K_LOSS,
)


def test_names_and_formulas_of_losses_agree() -> None:
    assert set(SINGLE_TOKEN) == set(SCORED_LOSSES)
    assert set(REJECTED_LOSSES) <= set(SINGLE_TOKEN)
    assert set(FULL_VOCABULARY) == set(FULL_VOCABULARY_LOSSES)
    others = {"cross_entropy", TOP_K_LOSS, *BLOCK_LOSSES}
    assert set(RESPONSE_LOSSES) == {*SINGLE_TOKEN, *FULL_VOCABULARY, *others}
