"""The map of CONTRIBUTING.md against the checkout: every file of a room is named in the room's row,
and every path that the map names exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE, UNIT = ROOT / "verl_opd", ROOT / "tests" / "unit"
BESIDE = "files beside the rooms"  # the row of files at the top of the package
SUFFIXES = (".py", ".md", ".sh", ".toml", ".json", ".yaml", ".txt")


def tables(text: str, heading: str) -> list[list[str]]:
    """Cells of every row of the tables below `heading`, up to the next heading; no header rows."""
    (part,) = re.findall(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    rows, lines = [], part.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and not following.startswith("|---"):
            rows.append(cells)
    return rows


def paths(cell: str) -> Iterator[str]:
    """Paths and patterns of paths between backticks; names with a <placeholder> are left out."""
    for words in re.findall(r"`([^`]+)`", cell):
        for word in words.split():
            if re.fullmatch(r"[\w./*-]+", word) and ("/" in word or word.endswith(SUFFIXES)):
                yield word


def absent(named: Iterable[str], *folders: Path) -> list[str]:
    """Paths that exist in none of the folders."""
    return [
        path
        for path in named
        if not any(next(folder.glob(path.rstrip("/")), None) for folder in folders)
    ]


def unnamed(named: Iterable[str], files: Iterable[str]) -> list[str]:
    """Files whose path is not named. The families of `drafts` have files of equal names: there a
    name without its folder stands for one in every folder.
    """
    known = set(named)
    return [file for file in files if not {file, file.rpartition("/")[2]} & known]


def python_files(folder: Path, pattern: str = "**/*.py") -> list[str]:
    found = sorted(file.relative_to(folder).as_posix() for file in folder.glob(pattern))
    return [file for file in found if not file.endswith("__init__.py")]


TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = {row[0].strip("`"): row[1] for row in tables(TEXT, "Rooms")}
ROOMS = sorted(f"{file.parent.name}/" for file in PACKAGE.glob("*/__init__.py"))
CHANGES = tables(TEXT, "To change ... edit ...")


def test_every_room_has_a_row() -> None:
    assert [room for room in ROOMS if room not in ROWS] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_row_of_a_room_names_its_files(room: str) -> None:
    named, folder = list(paths(ROWS[room])), PACKAGE / room
    assert unnamed(named, python_files(folder)) == []
    inside = [path for path in named if "/" not in path]
    nested = [path for path in named if "/" in path]
    assert absent([f"**/{path}" for path in inside if path.endswith(".py")], folder) == []
    assert absent(nested, folder, PACKAGE, ROOT) == []


def test_files_beside_the_rooms_are_named() -> None:
    named = list(paths(ROWS[BESIDE]))
    assert unnamed(named, python_files(PACKAGE, "*.py")) == []
    assert absent(named, PACKAGE) == []


@pytest.mark.parametrize("folder", ["scripts/", "docs/"])
def test_scripts_and_pages_are_named(folder: str) -> None:
    named = list(paths(ROWS[folder]))
    files = [file.name for file in (ROOT / folder).iterdir() if file.suffix in SUFFIXES]
    assert unnamed(named, files) == []
    assert absent(named, ROOT / folder, ROOT) == []


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row[0])
def test_every_path_of_a_change_exists(row: list[str]) -> None:
    _, code, tests, others = row
    assert absent(paths(code), PACKAGE, ROOT) == []
    assert absent(paths(tests), UNIT, ROOT) == []
    assert absent(paths(others), ROOT) == []


def test_the_tables_are_read_whole() -> None:
    assert len(CHANGES) > 25
    assert {"opd/losses.py", "opd/names.py"} <= set(paths(CHANGES[0][1]))
    assert all(len(row) == 4 for row in CHANGES)


def test_what_is_wrong_in_a_map_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").touch()
    row = "| `a/` | `b.py`, `a/c.py`, `x.y` |"
    text = f"### Rooms\n\n| room | files |\n|---|---|\n{row}\n\n## End\n| no | row |"
    ((room, files),) = tables(text, "Rooms")
    assert (room, list(paths(files))) == ("`a/`", ["b.py", "a/c.py"])
    assert absent(["a/b.py", "a/c.py", "a/*.py", "c/*.py", "a/"], tmp_path) == ["a/c.py", "c/*.py"]
    assert list(paths("`opd/<name>.py` `python s/p.py > d.md` `sft.loss` word.py")) == [
        *("s/p.py", "d.md")
    ]
    assert unnamed(["b.py", "d/e.py"], ["b.py", "c.py", "x/b.py", "d/e.py", "e.py"]) == [
        *("c.py", "e.py")
    ]
