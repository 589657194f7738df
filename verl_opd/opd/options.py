"""Options with their rule: what a field of a configuration may hold, declared beside the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

_RULE = "rule"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value may be. A value of None is always allowed: the type of the field decides."""

    # the value, or every entry of a list
    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    # exclusive lower bound
    above: float | None = None
    at_most: float | None = None
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
        if value is None:
            return ""
        if self.choices is not None:
            entries = value if isinstance(value, list) else [value]
            wrong = [entry for entry in entries if entry not in self.choices]
            return f"is not one of {', '.join(self.choices)}" if wrong else ""
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
