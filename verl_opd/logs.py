"""One tree of loggers, `verl_opd`, in every process of a run. Modules log to
`logging.getLogger(__name__)`; this module decides what a line looks like.
"""

from __future__ import annotations

import logging

TREE = "verl_opd"


class LineFormatter(logging.Formatter):
    """Time, level and the role of this process before every line of a message."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname:<7} {self._role}"
        return "\n".join(f"{head}  {line}" for line in super().format(record).splitlines() or [""])


def open_log(role: str) -> None:
    """Log to standard error, every line under `role`, such as "engine 1". Call it after
    `redirect_output`, which sends standard error to the log file of this process.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(role))
    tree = logging.getLogger(TREE)
    tree.handlers = [handler]
    tree.setLevel(logging.INFO)
    tree.propagate = False  # libraries may configure the root logger in any way
