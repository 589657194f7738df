"""The one metrics reducer: sums and counts travel, division happens once, after reduction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class StepMetrics:
    """Additive measurements of one step on one rank, by name; a name has one kind only."""

    # (sum, count), reported as sum / count and omitted when count is 0
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    # totals
    sums: dict[str, float] = field(default_factory=dict)
    # smallest values
    mins: dict[str, float] = field(default_factory=dict)
    # largest values
    maxs: dict[str, float] = field(default_factory=dict)

    def add_mean(self, name: str, total: float, count: float) -> None:
        old_total, old_count = self.means.get(name, (0.0, 0.0))
        self.means[name] = (old_total + total, old_count + count)

    def add_sum(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_min(self, name: str, value: float) -> None:
        self.mins[name] = min(value, self.mins.get(name, value))

    def add_max(self, name: str, value: float) -> None:
        self.maxs[name] = max(value, self.maxs.get(name, value))

    def only(self, prefix: str) -> StepMetrics:
        """The measurements whose name starts with `prefix`."""
        kinds = (self.means, self.sums, self.mins, self.maxs)
        means, sums, mins, maxs = (
            {name: value for name, value in kind.items() if name.startswith(prefix)}
            for kind in kinds
        )
        return StepMetrics(means, sums, mins, maxs)  # type: ignore[arg-type]

    def merge(self, other: StepMetrics) -> StepMetrics:
        """Fold `other` into this one and return it."""
        for name, (total, count) in other.means.items():
            self.add_mean(name, total, count)
        for name, value in other.sums.items():
            self.add_sum(name, value)
        for name, value in other.mins.items():
            self.add_min(name, value)
        for name, value in other.maxs.items():
            self.add_max(name, value)
        return self

    def finish(self) -> dict[str, float]:
        """name -> reported value; what was not measured is absent."""
        values: dict[str, float] = {
            name: total / count for name, (total, count) in self.means.items() if count > 0
        }
        for part in (self.sums, self.mins, self.maxs):
            overlap: Iterable[str] = values.keys() & part.keys()
            if overlap:
                raise ValueError(f"metrics reported under two kinds: {sorted(overlap)}")
            values.update(part)
        return values


def reduce_metrics(
    parts: Iterable[StepMetrics], extra: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Merge the measurements of all ranks and micro-batches and divide once; `extra` are already
    final values.
    """
    total = StepMetrics()
    for part in parts:
        total.merge(part)
    return {**total.finish(), **(extra or {})}
