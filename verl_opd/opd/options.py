"""Options with their rule: what a field of a configuration may hold, declared beside the field.

The options of losses and anchors are declared here; the section `opd` of the configuration
inherits them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from verl_opd.opd.names import CONVENTIONS, REJECTED_LOSSES, RESPONSE_LOSSES, RESPONSE_SPANS

_RULE = "rule"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value may be. A value of None is always allowed: the type of the field decides."""

    # the value, or every entry of a list
    choices: tuple[str, ...] | None = None
    at_least: float | None = None  # inclusive lower bound
    # exclusive lower bound
    above: float | None = None
    at_most: float | None = None  # inclusive upper bound
    # exclusive upper bound
    below: float | None = None
    # a value outside the range that switches something off, such as -1
    off: float | None = None
    # for all other rules: how a value breaks it, as the end of a message; "" when it does not
    check: Callable[[Any], str] | None = None

    def broken_by(self, value: Any) -> str:
        """How `value` breaks this rule, as the end of a message; empty when it does not.

        >>> Rule(at_least=1, off=-1).broken_by(0)
        'must be at least 1, or -1 (off)'
        """
        found = self.breach(value)
        return "" if found is None else found[1]

    def breach(self, value: Any) -> tuple[Any, str] | None:
        """(what breaks this rule, how): `value` itself, or the first such entry of a list under
        `choices`; None when nothing does.
        """
        entries = value if self.choices is not None and isinstance(value, list) else [value]
        for entry in entries:
            if problem := self._problem(entry):
                return entry, problem
        return None

    def _problem(self, value: Any) -> str:
        """How a single value breaks this rule."""
        if value is None:
            return ""
        if self.choices is not None:
            return "" if value in self.choices else f"is not one of {', '.join(self.choices)}"
        if self.check is not None:
            return self.check(value)
        if math.isfinite(value) and (value == self.off or self._in_range(value)):
            return ""
        return f"must {self._range()}" + (
            f", or {self.off:g} (off)" if self.off is not None else ""
        )

    def _in_range(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def _range(self) -> str:
        if self.at_least is None and self.above is None:
            return self._upper_bound()
        if self.at_most is None and self.below is None:
            return self._lower_bound()
        low = f"({self.above:g}" if self.at_least is None else f"[{self.at_least:g}"
        high = f"{self.below:g})" if self.at_most is None else f"{self.at_most:g}]"
        return f"lie in {low}, {high}"

    def _lower_bound(self) -> str:
        if self.at_least is None:
            return f"be greater than {self.above:g}"
        return f"be at least {self.at_least:g}" if self.at_least else "not be negative"

    def _upper_bound(self) -> str:
        if self.at_most is None:
            return f"be less than {self.below:g}" if self.below else "be negative"
        return f"be at most {self.at_most:g}"


def option(default: Any = MISSING, *, factory: Callable[[], Any] | None = None, **rule: Any) -> Any:
    """A dataclass field with a default and the Rule that `rule` describes."""
    metadata: Mapping[str, Any] = {_RULE: Rule(**rule)} if rule else {}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def rule_of(item: Field[Any]) -> Rule | None:
    """The rule of a dataclass field; None where any value of its type is allowed."""
    return item.metadata.get(_RULE)


def check_options(options: Any) -> None:
    """ValueError for the first field of the dataclass instance `options` that breaks its rule."""
    for item in fields(options):
        rule, value = rule_of(item), getattr(options, item.name)
        if rule is not None and (problem := rule.broken_by(value)):
            raise ValueError(f"{item.name}={value!r} {problem}")


@dataclass(kw_only=True)
class ConventionOptions:
    """What anchors and normalisers both depend on."""

    # exact: blocks and counts as the engine drafted; draft_opd: as in Draft-OPD
    convention: str = option("exact", choices=CONVENTIONS)


@dataclass(kw_only=True)
class AnchorOptions(ConventionOptions):
    """Which blocks of a rollout are replayed, and which of their slots are supervised."""

    # segment | block: how far after an anchor labels reach
    response_span: str = option("segment", choices=RESPONSE_SPANS)
    # keep every s-th response anchor, and the last
    response_anchor_stride: int = option(1, at_least=1)
    # per sample, evenly spread, the last kept; 0 = unlimited
    max_response_anchors: int = option(0, at_least=0)
    # ablation: response segments at random places of the response; rejections stay in place
    random_anchors: bool = False
    # use only the first rejected proposal of a block; switches the position decay off
    rejected_first_only: bool = False
    max_rejected_tokens: int = option(0, at_least=0)  # rejected proposals per sample; 0 = all


@dataclass(kw_only=True)
class LossOptions(ConventionOptions):
    """How the two loss streams are scored and weighed."""

    # on the one committed token: forward_kl, k2, k3, abs
    # on the likeliest tokens of a teacher server: forward_kl_topk
    # without a teacher: cross_entropy
    # on the full vocabulary: full_forward_kl, tv, lk_alpha, lk_lambda
    # e2e_tv: total variation of whole blocks, rejected proposals included (needs
    # rejected_stream_weight 0)
    response_loss: str = option("forward_kl", choices=RESPONSE_LOSSES)
    rejected_loss: str = option("k3", choices=REJECTED_LOSSES)  # on the rejected token
    # values of response_loss (k1, k2, k3, abs) become advantages of a PPO-clipped policy gradient
    # on the committed tokens
    policy_gradient: bool = False
    # of that policy gradient: the probability ratio is clipped to 1 - clip_ratio, 1 + clip_ratio
    clip_ratio: float = option(0.2, above=0)
    # of the committed tokens in the loss
    response_stream_weight: float = option(1.0, at_least=0)
    # of the rejected proposals in the loss
    rejected_stream_weight: float = option(1.0, at_least=0)
    # of the confidence stream, for drafts with such a head
    confidence_weight: float = option(1.0, at_least=0)
    # weight decay^(offset-1) of a rejected proposal; 1 = off
    rejected_position_decay: float = option(0.8, above=0, at_most=1)
    # the same for committed tokens
    response_position_decay: float = option(1.0, above=0, at_most=1)
    # bounds every per-token value, after log_prob_min_clamp; clamped tokens have no gradient
    loss_max_clamp: float | None = option(10.0, above=0)
    # bounds the single-token log-probs of both streams from below, of draft and target alike
    log_prob_min_clamp: float | None = option(-10.0, below=0)
