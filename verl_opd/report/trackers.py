"""Where metrics go: a JSONL file of our own, TensorBoard, wandb. All get the same names and the
same step axis.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

from verl_opd.errors import ConfigError

_STEP = "training/global_step"


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object a line in `metrics.jsonl`: step, unix time, then every metric by its name."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(
            json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n"
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars under `tensorboard/` of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A wandb run that a resumed training continues (its id is in the run directory).
    WANDB_MODE=offline needs no network.
    """

    def __init__(self, run_dir: Path, project: str, name: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trainer.logger lists wandb, but wandb is not installed: pip install "
                "'verl-opd[wandb]'"
            ) from error
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=project,
            name=name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=config,
        )
        # wandb's own step only grows: a validation of a step already logged would be dropped, and
        # so would what a resumed run repeats
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({_STEP: step, **metrics})

    def close(self) -> None:
        self._run.finish()


TRACKERS = ("console", "jsonl", "tensorboard", "wandb")


class Trackers:
    """All trackers named in `trainer.logger`. metrics.jsonl is always written, and the progress bar
    of `console` always shown.
    """

    def __init__(
        self, names: list[str], run_dir: Path, project: str, experiment: str, config: dict[str, Any]
    ) -> None:
        unknown = sorted(set(names) - set(TRACKERS))
        if unknown:
            raise ConfigError(
                f"trainer.logger={unknown} is unknown: choose from {', '.join(TRACKERS)}"
            )
        self._trackers: list[Tracker] = [JsonlTracker(run_dir)]
        if "tensorboard" in names:
            self._trackers.append(TensorBoardTracker(run_dir))
        if "wandb" in names:
            self._trackers.append(WandbTracker(run_dir, project, experiment, config))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
