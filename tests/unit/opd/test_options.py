"""Rules of options: which values they allow, and what they answer to all others."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import inf, nan
from typing import Any

import pytest

from verl_opd.config.schema import OpdConfig
from verl_opd.opd.options import (
    AnchorOptions,
    LossOptions,
    Rule,
    check_options,
    option,
    rule_of,
)


@pytest.mark.parametrize(
    ("rule", "allowed", "broken", "message"),
    [
        (Rule(at_least=1), [1, 2.5, 10**9], [0, 0.999, -1, nan, inf], "must be at least 1"),
        (Rule(at_least=0), [0, 0.1], [-1e-9, -1, nan, inf], "must not be negative"),
        (Rule(above=0), [1e-9, 5], [0, -1, nan, inf], "must be greater than 0"),
        (Rule(at_most=3), [3, -8], [3.1, nan, -inf], "must be at most 3"),
        (Rule(below=0), [-1e-9], [0, 1, nan, -inf], "must be negative"),
        (Rule(below=4), [3.9], [4, inf], "must be less than 4"),
        (Rule(above=0, at_most=1), [0.5, 1], [0, 1.1, nan], "must lie in (0, 1]"),
        (Rule(at_least=0, at_most=1), [0, 1], [-0.1, 1.1], "must lie in [0, 1]"),
        (Rule(at_least=0, below=1), [0, 0.9], [1, -0.1], "must lie in [0, 1)"),
        (Rule(above=0, below=1), [0.5], [0, 1], "must lie in (0, 1)"),
        (Rule(at_least=1, off=-1), [-1, 1], [0, -2], "must be at least 1, or -1 (off)"),
        (Rule(choices=("a", "b")), ["a", ["a", "b"], []], ["c", ["a", "c"]], "is not one of a, b"),
        (Rule(check=lambda x: "" if x else "is empty"), [[1]], [[]], "is empty"),
    ],
)
def test_rules(rule: Rule, allowed: list[Any], broken: list[Any], message: str) -> None:
    assert [rule.broken_by(value) for value in [None, *allowed]] == [""] * (len(allowed) + 1)
    assert [rule.broken_by(value) for value in broken] == [message] * len(broken)


def test_a_breach_names_the_entry_of_a_list_under_choices_and_other_lists_as_a_whole() -> None:
    rule = Rule(choices=("a", "b"))
    assert rule.breach(["a", "c", "d"]) == ("c", "is not one of a, b")
    assert rule.breach("c") == ("c", "is not one of a, b")
    assert rule.breach(["b", "a"]) is None
    assert Rule(check=lambda x: f"has {len(x)}").breach([1, 2]) == ([1, 2], "has 2")


def test_a_rule_stands_beside_its_field() -> None:
    @dataclass
    class Options:
        plain: int = option(3)
        ranged: int = option(4, at_least=1)
        listed: list[str] = option(factory=lambda: ["a"], choices=("a", "b"))

    assert Options() == Options(3, 4, ["a"])
    assert Options().listed is not Options().listed
    assert [rule_of(item) for item in fields(Options)] == [
        None,
        Rule(at_least=1),
        Rule(choices=("a", "b")),
    ]
    with pytest.raises(TypeError, match="at_lest"):
        option(3, at_lest=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AnchorOptions(response_span="line"), "response_span='line' is not one of segment, block"),
        (AnchorOptions(response_anchor_stride=0), "response_anchor_stride=0 must be at least 1"),
        (LossOptions(loss_max_clamp=-1.0), "loss_max_clamp=-1.0 must be greater than 0"),
        (OpdConfig(replay_check_freq=0), "replay_check_freq=0 must be at least 1, or -1 (off)"),
    ],
)
def test_options_are_checked_where_no_configuration_was_read(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_options(options)


def test_the_section_holds_every_option_of_losses_and_anchors_once() -> None:
    section = {item.name: item.default for item in fields(OpdConfig)}
    for part in (LossOptions, AnchorOptions):
        check_options(part())
        assert {item.name: item.default for item in fields(part)}.items() <= section.items()
    shared = {item.name for item in fields(LossOptions)} & {i.name for i in fields(AnchorOptions)}
    assert shared == {"convention"}
