"""The code still does what it did when the golden files of this folder were recorded (record.py).

Losses and weights are compared bit by bit on the machine of the recording, else with a tolerance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden import build, cases
from tests.golden.build import renamed

HERE = Path(__file__).parent
LOSS, NORM = 1e-5, 1e-4  # relative tolerance on another machine
CONFIGS = sorted(path.stem for path in (HERE / "config").glob("*.yaml"))


def golden(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def lines_of(name: str) -> list[str]:
    return (HERE / name).read_text().splitlines()


def plain(value: Any) -> Any:
    """`value` as it comes back from a file."""
    return json.loads(json.dumps(value))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested lists and mappings."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from numbers(part, f"{path}/{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from numbers(part, f"{path}/{index}")
    else:
        yield path, value


def tolerance(path: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """How far a number may be off on another machine."""
    if path.startswith("/steps") and path.endswith("/loss"):
        return {"rel": LOSS}
    if path.startswith("/weights/"):
        return {"rel": NORM, "abs": NORM * expected["weights"][path.split("/")[2]]["norm"]}
    return {"rel": NORM, "abs": 1e-6}


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], exact: bool) -> list[str]:
    """What differs between two runs of a case, apart from the machine."""
    skipped = {"machine"} if exact else {"machine", "weights_sha256"}
    left, right = ({k: run[k] for k in run if k not in skipped} for run in (found, expected))
    ours, theirs = dict(numbers(left)), dict(numbers(right))
    said = [f"{path}: in one run only" for path in sorted(ours.keys() ^ theirs.keys())]
    for path in ours.keys() & theirs.keys():
        old, new = theirs[path], ours[path]
        number = isinstance(old, int | float) and not exact
        wanted = pytest.approx(old, **tolerance(path, expected)) if number else old
        if new != wanted:
            said.append(f"{path}: {new!r}, was {old!r}")
    return sorted(said)


def same_machine(run: Mapping[str, Any]) -> bool:
    return bool(run["machine"] == build.machine())


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_losses_and_weights(name: str) -> None:
    found, expected = plain(build.losses(cases.CASES[name])), golden(f"losses/{name}.json")
    assert len(found["steps"]) == 20
    assert differences(found, expected, exact=same_machine(expected)) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dflash-exact-on_policy", {"opd.rejected_stream_weight": 1.0001}),
        ("eagle3-draft_opd-on_policy", {"opd.rejected_position_decay": 0.801}),
        ("dspark-exact-supervised", {"warmup.position_decay": 0.801}),
        ("dspark-confidence", {"opd.confidence_weight": 0.51}),
        ("dflash-schedule", {"optim.min_lr_ratio": 0.101}),
    ],
)
def test_a_small_change_is_noticed(name: str, change: dict[str, Any]) -> None:
    """Also with the tolerance of another machine."""
    case, expected = cases.CASES[name], golden(f"losses/{name}.json")
    found = plain(build.losses(replace(case, settings={**case.settings, **change})))
    assert differences(found, expected, exact=False) != []


def test_every_golden_run_is_a_case_and_differs_from_the_others() -> None:
    runs = {path.stem: golden(f"losses/{path.name}") for path in (HERE / "losses").iterdir()}
    assert runs.keys() == cases.CASES.keys()
    sums = {name: run["weights_sha256"] for name, run in runs.items() if "supervised" not in name}
    assert len(set(sums.values())) == len(sums)
    for family in cases.FAMILIES:  # the convention is one of on-policy plans only
        exact, other = (runs[f"{family}-{rule}-supervised"] for rule in cases.CONVENTIONS)
        assert exact == other
    for run in runs.values():
        assert len({step["loss"] for step in run["steps"]}) == 20
        assert not any(step["skipped"] for step in run["steps"])


# -- configuration --------------------------------------------------------------------------------


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; an empty section is a value."""
    found: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


@pytest.mark.parametrize("recipe", CONFIGS)
def test_resolved_config(recipe: str) -> None:
    expected = flat(yaml.safe_load((HERE / "config" / f"{recipe}.yaml").read_text()))
    found = flat(yaml.safe_load(build.printed_config(recipe)))
    assert found == {renamed(key): value for key, value in expected.items()}


def test_every_recipe_has_its_golden_config() -> None:
    assert build.recipes() == CONFIGS


def test_prefixes_are_renamed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "RENAMED", {"a": "z", "a.b": "y.x"})
    assert [renamed(key) for key in ("a", "a.c", "a.b", "a.b.c", "ab.c", "c.a")] == [
        *("z", "z.c", "y.x", "y.x.c", "ab.c", "c.a")
    ]
    assert [line_renamed(line) for line in ("++a.c=a.c", "~a.b", "b=a")] == [
        *("++z.c=a.c", "~y.x", "b=a")
    ]


# -- metric names ---------------------------------------------------------------------------------


def test_logged_metrics_are_golden_and_documented() -> None:
    """test_losses_and_weights holds every case to its own names; this is their union."""
    logged = {
        name for case in cases.CASES for name in golden(f"losses/{case}.json")["metric_names"]
    }
    assert sorted(logged) == lines_of("metrics.txt")
    assert build.undocumented(sorted(logged)) == []


def test_documented_metrics() -> None:
    assert build.documented_metrics() == lines_of("documented_metrics.txt")


# -- aliases --------------------------------------------------------------------------------------


def line_renamed(line: str) -> str:
    """An override line with today's name of its key."""
    match = re.fullmatch(r"([+~]*)([^=]+)(=.*)?", line, re.DOTALL)
    return match[1] + renamed(match[2]) + (match[3] or "") if match else line


def test_outcomes_of_alias_lines() -> None:
    table, rows = golden("alias_table.json"), golden("alias_outcomes.json")
    kinds = {row["outcome"] for row in rows}
    assert kinds == {"translated", "dropped", "error"}
    for row in rows:
        given = [
            line if line.lstrip("+").split("=")[0] in table else line_renamed(line)
            for line in row["given"]
        ]
        found, lines = build.translated(given), [line_renamed(line) for line in row["lines"]]
        assert found == {"outcome": row["outcome"], "lines": lines}, given


def test_rows_of_the_alias_table() -> None:
    """New rows may come; those that were there do what they did."""
    found = plain(build.alias_table())
    for key, row in golden("alias_table.json").items():
        assert found.get(key) == {**row, "keys": [renamed(new) for new in row["keys"]]}, key


# -- wire form of a trace -------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.TRACES)
def test_wire_form_of_a_trace(name: str) -> None:
    example = golden("traces.json")[name]
    assert (example["events"], example["length"]) == tuple(plain(cases.TRACES[name]))
    events = [(accepted, drafted, rejected) for accepted, drafted, rejected in example["events"]]
    assert build.wire_fields(events, example["length"]) == example["fields"]
    assert build.from_wire(example["fields"], example["length"]) == example["trace"]


@pytest.mark.parametrize("name", cases.BROKEN_FIELDS)
def test_broken_fields_are_an_error(name: str) -> None:
    example = golden("traces.json")["worked_example"]
    fields = example["fields"] | cases.BROKEN_FIELDS[name]
    left = {key: value for key, value in fields.items() if value is not None}
    assert build.from_wire(left, example["length"]) is None
