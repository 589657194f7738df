"""Which metric names docs/metrics.md defines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


@cache
def documented() -> list[re.Pattern[str]]:
    """Patterns of the names in the first column of every table (in backticks); a name without its
    folder continues the one before it.
    """
    patterns = []
    for line in DOCS.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        folder = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            full = f"{folder.rpartition('/')[0]}{name}" if name.startswith("/") else name
            if "/" not in full:
                full = f"{folder.rpartition('/')[0]}/{full}"
            folder = full
            patterns.append(
                re.compile(re.sub(r"<k>", r"\\d+", re.escape(full).replace("<benchmark>", "[^/]+")))
            )
    return patterns


def undocumented(names: Iterable[str]) -> set[str]:
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in documented())}
