"""Held-out benchmarks, measured by the engine itself: greedy rollouts whose verify steps are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_opd.controller.fleet import Fleet
from verl_opd.data.prompts import Prompt
from verl_opd.report.acceptance import BenchmarkResult

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks of data.val_files."""

    prompts: dict[str, list[Prompt]]  # by name; may be empty
    max_response_length: int  # tokens

    def run(self, fleet: Fleet, draft_version: int) -> list[BenchmarkResult]:
        """Roll out every benchmark with the draft that the engines hold."""
        sampling = {**GREEDY, "max_tokens": self.max_response_length}
        return [
            BenchmarkResult.of(name, fleet.generate(prompts, sampling, draft_version))
            for name, prompts in self.prompts.items()
        ]
