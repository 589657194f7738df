"""One tree of loggers, `verl_opd`, in every process of a run. Modules log to
`logging.getLogger(__name__)`; this module decides what a line looks like.
"""

from __future__ import annotations

import logging
from pathlib import Path

TREE = "verl_opd"
# what a process is, by the name of its log file
ROLES = {"train": "trainer rank", "rollout": "engine", "teacher": "teacher", "agent": "agent loop"}


class LineFormatter(logging.Formatter):
    """Time, level and the role of this process before every line of a message."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname:<7} {self._role}"
        return "\n".join(f"{head}  {line}" for line in super().format(record).splitlines() or [""])


def open_log(log_path: str) -> None:
    """Log to standard error, under the role that `log_path` is named for ("engine 1" for
    `logs/rollout_1.log`). Call it after `redirect_output(log_path)`.
    """
    kind, _, number = Path(log_path).stem.rpartition("_")
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"{ROLES[kind]} {number}"))
    tree = logging.getLogger(TREE)
    tree.handlers = [handler]
    tree.setLevel(logging.INFO)
    tree.propagate = False  # libraries may configure the root logger in any way
