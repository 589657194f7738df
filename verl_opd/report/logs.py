"""What the driver logs: on the console as plain messages, in logs/run.log with time and level."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_opd.logs import TREE, LineFormatter
from verl_opd.report.console import Console


class ConsoleHandler(logging.Handler):
    """Prints messages without time and level, above a progress bar that may be running."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record))


@contextmanager
def driver_log(console: Console, file: Path) -> Iterator[None]:
    """While entered, all messages of the tree from INFO up go to `console` and are appended to
    `file`. On exit the tree gets its former handlers and level back.
    """
    tree = logging.getLogger(TREE)
    before = tree.handlers, tree.level, tree.propagate
    to_file = logging.FileHandler(file, encoding="utf-8")
    to_file.setFormatter(LineFormatter("driver"))
    try:
        tree.handlers = [ConsoleHandler(console), to_file]
        tree.setLevel(logging.INFO)
        tree.propagate = False
        yield
    finally:
        tree.handlers = before[0]
        tree.setLevel(before[1])
        tree.propagate = before[2]
        to_file.close()
