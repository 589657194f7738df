"""What a batch of rollout samples shows: accept length, acceptance by position, lengths (sums and
counts, divided once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.trace import RolloutSample, VerifyTrace, accepted_by_position


@dataclass
class Acceptance:
    """Additive acceptance counts of traces, without prefill tokens and draft-free steps."""

    committed: int = 0  # tokens, the bonus token counted
    verify_steps: int = 0
    drafted: int = 0  # proposed tokens
    by_position: tuple[int, ...] = ()  # [k-1]: verify steps that accepted proposal k

    @classmethod
    def of(cls, traces: Sequence[VerifyTrace]) -> Acceptance:
        steps = [step for trace in traces for step in trace.steps]
        return cls(
            committed=sum(step.committed for step in steps),
            verify_steps=len(steps),
            drafted=sum(len(step.drafted) for step in steps),
            by_position=accepted_by_position(steps),
        )

    @property
    def tau(self) -> float | None:
        """The accept length: committed tokens per verify step."""
        return self.committed / self.verify_steps if self.verify_steps else None

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(hits / self.verify_steps for hits in self.by_position)


def rollout_metrics(samples: Sequence[RolloutSample], max_response_length: int) -> StepMetrics:
    """Metrics of one rollout step under the names of users' dashboards."""
    metrics = StepMetrics()
    acceptance = Acceptance.of([sample.trace for sample in samples])
    if acceptance.verify_steps:
        metrics.add_mean(
            "opd/rollout/accept_length/mean", acceptance.committed, acceptance.verify_steps
        )
        metrics.add_mean(
            "rollout/accept_length/accepted_only",
            sum(acceptance.by_position),
            acceptance.verify_steps,
        )
        responded = sum(len(sample.response_ids) for sample in samples if sample.trace.steps)
        metrics.add_mean(
            "rollout/accept_length/response_tokens", responded, acceptance.verify_steps
        )
        metrics.add_mean(
            "rollout/spec_accept_rate", sum(acceptance.by_position), acceptance.drafted
        )
        for position, hits in enumerate(acceptance.by_position, start=1):
            metrics.add_mean(f"rollout/accept_rate_pos_{position}", hits, acceptance.verify_steps)
    for sample in samples:
        _add_sample(metrics, sample, max_response_length)
    return metrics


def _add_sample(metrics: StepMetrics, sample: RolloutSample, max_response_length: int) -> None:
    length, prompt = len(sample.response_ids), len(sample.prompt_ids)
    truncated = sample.finish_reason == "length"
    metrics.add_mean("response_length/mean", length, 1)
    metrics.add_max("response_length/max", length)
    metrics.add_min("response_length/min", length)
    metrics.add_mean("response_length/clip_ratio", length >= max_response_length, 1)
    metrics.add_mean("response/aborted_ratio", sample.finish_reason == "abort", 1)
    metrics.add_mean("prompt_length/mean", prompt, 1)
    metrics.add_max("prompt_length/max", prompt)
    metrics.add_mean("data/truncated_share", truncated, 1)
    if not sample.trace.steps and sample.trace.draft_free:
        return  # rolled out without drafting: it has no verify steps to measure
    boundaries = len(sample.trace.steps)
    metrics.add_mean("opd/rollout/reject_token_count/mean", boundaries, 1)
    metrics.add_mean("opd/rollout/non_reject_token_count/mean", length - boundaries, 1)
    metrics.add_mean("opd/rollout/empty_reject_ratio", length > 0 and boundaries == 0, 1)


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """One benchmark rolled out greedily with one draft version."""

    benchmark: str  # its name in data.val_files
    tau: float | None  # accept length, bonus token counted; None without a verify step
    by_position: tuple[float, ...]  # [k-1]: share of verify steps that accepted proposal k
    verify_steps: int
    response_length: float  # mean, in tokens
    truncated_share: float  # share of responses that ran to the length limit
    samples: int

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> BenchmarkResult:
        """The inverse of `as_dict`, also after a trip through JSON."""
        return cls(**{**row, "by_position": tuple(row["by_position"])})

    @classmethod
    def of(cls, benchmark: str, samples: Sequence[RolloutSample]) -> BenchmarkResult:
        acceptance = Acceptance.of([sample.trace for sample in samples])
        count = len(samples)
        return cls(
            benchmark=benchmark,
            tau=acceptance.tau,
            by_position=acceptance.rates,
            verify_steps=acceptance.verify_steps,
            response_length=sum(len(sample.response_ids) for sample in samples) / count,
            truncated_share=sum(sample.finish_reason == "length" for sample in samples) / count,
            samples=count,
        )

    def metrics(self) -> dict[str, float]:
        prefix = f"test_rollout/{self.benchmark}"
        values = {
            f"{prefix}/response_length": self.response_length,
            f"{prefix}/truncated_share": self.truncated_share,
        }
        if self.tau is not None:
            values[f"{prefix}/vllm_spec_accept_length"] = self.tau
        values.update(
            {
                f"{prefix}/accept_rate_pos_{k}": rate
                for k, rate in enumerate(self.by_position, start=1)
            }
        )
        return values

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def mean_tau(results: Sequence[BenchmarkResult]) -> float | None:
    """Mean accept length of the benchmarks that have one; decides which checkpoint is best."""
    taus = [result.tau for result in results if result.tau is not None]
    return sum(taus) / len(taus) if taus else None


def results_by_stage(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, list[BenchmarkResult]]:
    """Results as summary.json and checkpoints hold them, by the point of the run at which they were
    measured. Files written before stages had names call `after_sft` `after_warmup`.
    """
    return {
        "after_sft" if point == "after_warmup" else point: list(
            map(BenchmarkResult.from_dict, found)
        )
        for point, found in rows.items()
    }
