"""Who may import what, and how long files may be: the layout stays what CONTRIBUTING.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "verl_opd"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 620
MAX_TOTAL_LINES = 15_500

RAY_PLACES = ("controller/", "rollout/", "training/worker.py")
VLLM_PLACES = ("engines/",)
RAY_FREE = ("drafts/", "targets/", "engines/")


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether it is imported when the module is) of every
    import statement.
    """
    lazy = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(scope, ast.If) and "TYPE_CHECKING" in ast.dump(scope.test))
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])]), id(node) not in lazy


def violations(path: str, source: str) -> list[str]:
    """Broken rules of a file at `path`, relative to the package."""
    module = f"verl_opd/{path}".removesuffix(".py").replace("/", ".")
    found = []
    for name, at_import in _imports(ast.parse(source), module):
        top = name.split(".")[0]
        inside_opd = name == "verl_opd.opd" or name.startswith("verl_opd.opd.")
        if path.startswith("opd/") and top == "verl_opd" and not inside_opd:
            found.append(f"{path}: opd imports nothing else of ours, but {name}")
        if top == "ray" and (path.startswith(RAY_FREE) or not path.startswith(RAY_PLACES)):
            found.append(f"{path}: only {', '.join(RAY_PLACES)} import ray")
        if top == "vllm" and not path.startswith(VLLM_PLACES):
            found.append(f"{path}: only {', '.join(VLLM_PLACES)} import vllm")
        if top == "vllm" and at_import:
            found.append(f"{path}: vllm is imported lazily, inside functions")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_import_rules(file: Path) -> None:
    assert violations(str(file.relative_to(PACKAGE)), file.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("opd/plan.py", "from verl_opd.opd.trace import VerifyTrace", 0),
        ("opd/plan.py", "from verl_opd.errors import ConfigError", 1),
        ("opd/plan.py", "from ..errors import ConfigError", 1),
        ("opd/plan.py", "def f():\n    import ray", 1),
        ("drafts/base.py", "import ray", 1),
        ("data/loader.py", "from ray.util import state", 1),
        ("training/worker.py", "import ray", 0),
        ("training/step.py", "import ray", 1),
        ("controller/loop.py", "import vllm", 2),
        ("commands/bench.py", "import ray", 1),
        ("engines/vllm.py", "import ray", 1),
        ("rollout/server.py", "def f():\n    from vllm import LLM", 1),
        ("engines/vllm.py", "import vllm", 1),
        ("engines/vllm.py", "def f():\n    from vllm import LLM", 0),
        (
            "engines/vllm.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm import LLM",
            0,
        ),
        ("targets/hf.py", "def f():\n    from vllm import LLM", 1),
        ("config/load.py", "import vllm_plugin", 0),
    ],
)
def test_the_rules_themselves(path: str, source: str, broken: int) -> None:
    assert len(violations(path, source)) == broken


@pytest.mark.parametrize(
    "file",
    [*FILES, *sorted((ROOT / "tests").rglob("*.py"))],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


def test_the_package_stays_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= MAX_TOTAL_LINES


def test_init_files_are_empty_except_for_draft_families() -> None:
    filled = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        if file.name == "__init__.py" and file.read_text().strip()
    }
    assert {name for name in filled if not name.startswith("drafts/")} == set()
