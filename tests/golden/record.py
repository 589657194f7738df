"""Records the golden files anew: `python -m tests.golden.record [folder]` (default: this folder).

Everything is recorded; look at the difference before you believe it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import alias_combinations, alias_rows
from tests.golden import build, cases

HERE = Path(__file__).parent


def metric_names(runs: dict[str, dict[str, Any]]) -> list[str]:
    """All names that the runs logged."""
    return sorted({name for run in runs.values() for name in run["metric_names"]})


def alias_outcomes() -> list[dict[str, Any]]:
    """Every row of tests/alias_rows.py with what becomes of it."""
    given = [[old] for old, _ in alias_rows.RENAMED]
    given += [[old] for old in alias_rows.DROPPED]
    given += [[old] for old, _ in alias_rows.UNSUPPORTED]
    given += [list(old) for old, _ in alias_combinations.TOGETHER]
    given += [list(old) for old, _ in alias_combinations.CONFLICTS]
    given.append(list(alias_combinations.LAUNCHER))
    return [{"given": lines, **build.translated(lines)} for lines in given]


def wire_examples() -> dict[str, Any]:
    """Every example of cases.py: what the engine did, its fields, and the trace read from them."""
    examples = {}
    for name, (events, length) in cases.TRACES.items():
        fields = build.wire_fields(events, length)
        examples[name] = {
            "events": events,
            "length": length,
            "fields": fields,
            "trace": build.from_wire(fields, length),
        }
    return examples


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def record(folder: Path) -> None:
    runs = {name: build.losses(case) for name, case in cases.CASES.items()}
    for name, run in runs.items():
        _write(folder / "losses" / f"{name}.json", run)
    (folder / "config").mkdir(parents=True, exist_ok=True)
    for recipe in build.recipes():
        (folder / "config" / f"{recipe}.yaml").write_text(build.printed_config(recipe))
    (folder / "metrics.txt").write_text("\n".join(metric_names(runs)) + "\n")
    documented = build.documented_metrics()
    (folder / "documented_metrics.txt").write_text("\n".join(documented) + "\n")
    _write(folder / "alias_outcomes.json", alias_outcomes())
    _write(folder / "alias_table.json", build.alias_table())
    _write(folder / "traces.json", wire_examples())


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
