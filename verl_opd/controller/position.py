"""Where a run is in its data: the part of a checkpoint beside the weights, written and read in one
place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.controller.job import Job
from verl_opd.controller.progress import OPD, SFT, Progress
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.errors import ConfigError
from verl_opd.opd.trace import RolloutSample
from verl_opd.training.checkpoint import CheckpointStore, check_identity


@dataclass
class Position:
    """Where a run is in its data, and its counters."""

    prompts: Loader[Prompt]  # next batches to roll out
    progress: Progress
    # given conversations, while supervised steps still learn from them
    conversations: Loader[RolloutSample] | None = None
    given: str = ""  # what those conversations are, for the console

    def state(self) -> dict[str, Any]:
        """The form in a checkpoint; `position_at` reads it."""
        given = None if self.conversations is None else self.conversations.state()
        return {
            "progress": self.progress.state(),
            "data": self.prompts.state(),
            "conversations": given,
        }

    def finished(self, cfg: Config) -> bool:
        """Whether all steps of all stages are done."""
        planned = planned_steps(cfg, self.prompts)
        return all(self.progress.steps[name] >= steps for name, steps in planned.items())


def planned_steps(cfg: Config, prompts: Loader[Prompt]) -> dict[str, int]:
    """Steps of the whole run by stage, in the order of the stages."""
    on_policy = cfg.trainer.total_training_steps
    if on_policy is None:
        on_policy = cfg.trainer.total_epochs * prompts.batches_per_epoch
    return {SFT: cfg.sft.steps, OPD: on_policy}


def position_at(job: Job, checkpoint: Path | None) -> Position:
    """Where `checkpoint` left data and counters (None: the beginning); ConfigError when it belongs
    to another run or other data.
    """
    data = job.cfg.data
    prompts = Loader(job.train, data.train_batch_size, data.shuffle, data.seed)
    at = Position(prompts, Progress())
    state: dict[str, Any] = {}
    if checkpoint is not None:
        check_identity(checkpoint, job.identity)
        state = CheckpointStore.read_state(checkpoint)
        at.prompts.load_state(state["data"])
        at.progress = Progress.from_state(state["progress"])
    for name in planned_steps(job.cfg, prompts):
        at.progress.steps.setdefault(name, 0)  # checkpoints hold the counter of every stage
    if at.progress.steps[SFT] < job.cfg.sft.steps:
        _place_conversations(at, job, state.get("conversations"))
    return at


def _place_conversations(at: Position, job: Job, state: dict[str, Any] | None) -> None:
    """Load the given conversations, if there are any, and continue them where `state` was taken."""
    sft, data = job.cfg.sft, job.cfg.data
    if at.progress.steps[SFT] and (state is None) != (job.conversations is None):
        raise ConfigError(
            f"the checkpoint was written {'without' if state is None else 'with'} sft.files, "
            "between two supervised steps: restore that key to resume, or start a new run from the "
            "exported draft with draft.path"
        )
    if job.conversations is not None:
        samples, report = job.conversations()
        at.conversations = Loader(
            samples, sft.samples_per_update, data.shuffle, data.seed, "sft.samples_per_update"
        )
        at.given = f"given  {len(samples)} conversations ({report})\n"
        if state is not None:
            at.conversations.load_state(state)
