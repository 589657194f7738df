"""samples.log: responses of the engine, with every proposal of the draft marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_opd.opd.trace import RolloutSample

Decode = Callable[[Sequence[int]], str]


def marked(sample: RolloutSample, decode: Decode) -> str:
    """The response with `[{accepted}rejected]` for every verify step: the proposals, those that
    were accepted in braces.

    What stands outside brackets (the prefill token, corrections, bonus tokens, draft-free tokens)
    and inside braces is the response. An accepted proposal past the response's end (EOS inside a
    block) is left out.
    """
    ids = sample.response_ids
    pieces, position = [], 0
    for step in sample.trace.steps:
        known = ids[position : step.anchor + 1]
        accepted = min(step.accepted, step.committed)
        pieces.append(
            f"{decode(known)}[{{{decode(step.drafted[:accepted])}}}{decode(step.rejected)}]"
        )
        position = step.anchor + 1 + accepted
    return "".join(pieces) + decode(ids[position:])


class SampleLog:
    """Appends one sample a step to `path`."""

    def __init__(self, path: Path, decode: Decode) -> None:
        self._path, self._decode = path, decode

    def write(self, step: int, sample: RolloutSample) -> None:
        steps = "" if not sample.trace.steps else f", {len(sample.trace.steps)} verify steps"
        header = (
            f"== step {step}, sample {sample.sample_id}, draft version {sample.draft_version}, "
            f"{len(sample.response_ids)} tokens{steps}"
        )
        with self._path.open("a", encoding="utf-8") as file:
            prompt = self._decode(sample.prompt_ids)
            file.write(f"{header}\n{prompt}\n--\n{marked(sample, self._decode)}\n\n")
