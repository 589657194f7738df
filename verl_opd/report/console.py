"""The console: one progress bar per stage on a terminal, plain lines otherwise, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from verl_opd.report.acceptance import BenchmarkResult

_SHOWN = {
    "actor/distillation/loss": "loss",
    "actor/lr": "lr",
    "actor/grad_norm": "grad",
    "opd/rollout/accept_length/mean": "tau",
    "response_length/mean": "len",
    "timing_s/gen": "gen_s",
    "timing_s/update_actor": "update_s",
}


def short(metrics: Mapping[str, float]) -> str:
    """The few numbers that fit beside a progress bar."""
    return "  ".join(
        f"{label} {metrics[name]:.4g}" for name, label in _SHOWN.items() if name in metrics
    )


class StageBar:
    """The progress bar of one stage; without a terminal, its plain lines."""

    def __init__(
        self, console: RichConsole, title: str, total: int, done: int, progress: Progress | None
    ) -> None:
        self._console, self._progress = console, progress
        self._title, self._total, self._done = title, total, done
        self._task = (
            progress.add_task(title, total=total, completed=done, note="") if progress else None
        )

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One more step is done; show the most important of its metrics."""
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, note=short(metrics))
        else:
            self._console.print(
                f"{self._title} {self._done}/{self._total}  {short(metrics)}", highlight=False
            )


class Console:
    """Everything that a command prints."""

    def __init__(self) -> None:
        self._rich = RichConsole(soft_wrap=True)

    def print(self, text: str) -> None:
        self._rich.print(text, highlight=False, markup=False)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[StageBar]:
        """A bar of `total` steps, of which `done` are already done."""
        if not self._rich.is_terminal:
            yield StageBar(self._rich, title, total, done, None)
            return
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=self._rich) as progress:
            yield StageBar(self._rich, title, total, done, progress)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned plain text: the first column to the left, the others to the right; never folded
        or cut.
        """
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (header, *rows)
        ]
        self._rich.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            self._rich.print(f"  {line}", highlight=False, markup=False)

    def acceptance(self, title: str, results: Mapping[str, Sequence[BenchmarkResult]]) -> None:
        """Accept length and acceptance by position, one row a stage and benchmark."""
        flat = [
            (stage, result) for stage, stage_results in results.items() for result in stage_results
        ]
        width = max((len(result.by_position) for _, result in flat), default=0)
        header = [
            "stage",
            "benchmark",
            "tau",
            *(f"pos{k}" for k in range(1, width + 1)),
            "len",
            "cut",
        ]
        rows = [
            [
                stage.replace("_", " "),
                result.benchmark,
                "-" if result.tau is None else f"{result.tau:.3f}",
                *(f"{rate:.2f}" for rate in result.by_position),
                *("" for _ in range(width - len(result.by_position))),
                f"{result.response_length:.0f}",
                f"{result.truncated_share:.0%}",
            ]
            for stage, result in flat
        ]
        self.table(title, header, rows)
