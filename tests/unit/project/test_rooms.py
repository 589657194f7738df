"""The layout and the yardsticks of CONTRIBUTING.md: widths, lengths, sizes of rooms, and which room
may import what. Every rule is a function from sources to violations, itself tested on small wrong
sources.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from scripts.npu_plan import strings_of

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "verl_opd"
WIDTH = 100  # columns
FILE_LINES = 500
FUNCTION_LINES = 60
FIELDS = 12
POSITIONAL_FIELDS = 5  # a dataclass with more is keyword-only
ROOM_STATEMENTS = 2_000
ROOM_SHARE = 0.15
PACKAGE_STATEMENTS = 11_000

# a room imports from its own group and from groups above it in this list
GROUPS = (
    ("opd",),
    ("snapshot", "errors", "process", "devices", "signals", "logs"),
    ("config",),
    ("drafts", "targets", "data", "engines", "compat", "ascend"),
    ("rollout", "training"),
    ("report",),
    ("controller",),
    ("commands",),
    ("cli",),
)
RAY_PLACES = ("controller/", "rollout/", "training/worker.py")
VLLM_PLACES = ("engines/",)

PROSE = (".md",)
TEXT = (".sh", ".yaml", ".yml", ".toml", "Makefile", ".ci/run")


def python_sources(*folders: str) -> dict[str, str]:
    """Text of every Python file below folders of the checkout, by path within it."""
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def package_sources() -> dict[str, str]:
    """Text of every file of the package, by path within it."""
    return {
        path.removeprefix("verl_opd/"): text for path, text in python_sources("verl_opd").items()
    }


def other_texts() -> dict[str, str]:
    """Scripts, settings and pages, by path; neither third-party code nor recorded golden files."""
    folders = ("docs", "examples", "recipes", "scripts")
    files = [
        *(file for file in ROOT.iterdir() if file.is_file()),
        *(file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()),
        ROOT / ".ci" / "run",
        ROOT / "third_party" / "README.md",
    ]
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in sorted(files)
        if str(file.relative_to(ROOT)).endswith((*PROSE, *TEXT))
    }


# --- rules: path and text of files -> violations ------------------------------------------------


def wide_lines(path: str, text: str) -> list[str]:
    """Lines above WIDTH columns. In pages, tables, headings and lines that are one link may be
    wider, fenced code may not.
    """
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= path.endswith(PROSE) and line.lstrip().startswith("```")
        free = path.endswith(PROSE) and not fenced and _may_be_wide(line.strip())
        if len(line) > WIDTH and not free:
            found.append(f"{path}:{number}: {len(line)} columns")
    return found


def _may_be_wide(line: str) -> bool:
    link = r"([-*] )?(!?\[[^\]]*\]\([^)]*\)|\[[^\]]+\]: \S+|<?https?://\S+>?)[.,;:]?"
    return line.startswith(("|", "#")) or re.fullmatch(link, line) is not None


def long_files(path: str, text: str) -> list[str]:
    lines = len(text.splitlines())
    return [f"{path}: {lines} lines"] if lines > FILE_LINES else []


def long_functions(path: str, text: str) -> list[str]:
    """Functions above FUNCTION_LINES, signature and docstring included."""
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]


def _dataclasses(text: str) -> Iterator[tuple[ast.ClassDef, list[ast.AnnAssign], bool]]:
    """(class, its own fields, whether it is keyword-only) of every dataclass."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [
            line
            for line in node.body
            if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
        ]
        for decorator in node.decorator_list:
            name, _, arguments = ast.unparse(decorator).partition("(")
            if name in ("dataclass", "dataclasses.dataclass"):
                yield node, fields, "kw_only=True" in arguments


def large_records(path: str, text: str) -> list[str]:
    """Dataclasses with more than FIELDS fields, or with many that can be passed by position; the
    schema's sections may.
    """
    if path.endswith("config/schema.py"):
        return []
    found = []
    for node, fields, keyword_only in _dataclasses(text):
        if len(fields) > FIELDS:
            found.append(f"{path}:{node.lineno}: {node.name} has {len(fields)} fields")
        if len(fields) > POSITIONAL_FIELDS and not keyword_only:
            found.append(f"{path}:{node.lineno}: {node.name} is not kw_only")
    return found


def undocumented_fields(path: str, text: str) -> list[str]:
    """Fields of dataclasses without a comment on their lines or directly above, or a string
    directly below. A field whose type is a class of its own is documented there.
    """
    comments: dict[int, bool] = {}  # line -> whether it holds nothing but the comment
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.line.strip() == token.string
    found = []
    for node, fields, _ in _dataclasses(text):
        for field in fields:
            end = field.end_lineno or field.lineno
            following = node.body[node.body.index(field) + 1 :][:1]
            documented = (
                any(line in comments for line in range(field.lineno, end + 1))
                or comments.get(field.lineno - 1, False)
                or any(_is_string(line) for line in following)
            )
            if not documented and not _own_class(field.annotation):
                found.append(f"{path}:{field.lineno}: {node.name}.{ast.unparse(field.target)}")
    return found


def _own_class(annotation: ast.expr) -> bool:
    """Whether the type is one class that is neither general nor a tensor, such as `Config`."""
    return (
        isinstance(annotation, ast.Name)
        and annotation.id[:1].isupper()
        and annotation.id not in ("Any", "Path", "Tensor")
    )


def _is_string(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def large_rooms(sources: Mapping[str, str], total: int = PACKAGE_STATEMENTS) -> list[str]:
    """Rooms above ROOM_STATEMENTS or ROOM_SHARE, and a package above `total`."""
    rooms = Counter[str]()
    for path, text in sources.items():
        rooms[room_of(path)] += statements(text)
    everything = sum(rooms.values())
    found = [
        f"{room}: {count} statements, {count / everything:.1%}"
        for room, count in rooms.items()
        if count > ROOM_STATEMENTS or count > ROOM_SHARE * everything
    ]
    return [*found, f"package: {everything} statements"] if everything > total else found


def _imports(path: str, text: str) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether it is imported together with the file) of every import;
    `from a import b` is a.b.
    """
    tree = ast.parse(text)
    lazy = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(scope, ast.If) and "TYPE_CHECKING" in ast.dump(scope.test))
        for node in ast.walk(scope)
    }
    parts = f"verl_opd/{path}".split("/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = parts[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", id(node) not in lazy


def misplaced_imports(path: str, text: str) -> list[str]:
    """Imports of ray and vllm outside of their places, and of vllm outside of functions."""
    found = set()
    for name, at_import in _imports(path, text):
        top = name.split(".")[0]
        if top == "ray" and not path.startswith(RAY_PLACES):
            found.add(f"{path}: only {', '.join(RAY_PLACES)} import ray")
        if top == "vllm" and not path.startswith(VLLM_PLACES):
            found.add(f"{path}: only {', '.join(VLLM_PLACES)} import vllm")
        if top == "vllm" and at_import:
            found.add(f"{path}: vllm is imported lazily, inside functions")
    return sorted(found)


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Files of the package that each file imports, in functions or not."""
    modules = {
        ".".join(["verl_opd", *path.removesuffix(".py").removesuffix("/__init__").split("/")]): path
        for path in sources
    }
    found: dict[str, set[str]] = {}
    for path, text in sources.items():
        names = [name for name, _ in _imports(path, text)]
        targets = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
        found[path] = {target for target in targets if target and target != path}
    return found


def upward_arrows(sources: Mapping[str, str]) -> list[str]:
    """Imports from a group further down in GROUPS, or, for opd, from anywhere else."""
    level = {room: index for index, rooms in enumerate(GROUPS) for room in rooms}
    found = []
    for path, targets in arrows(sources).items():
        for target in sorted(targets):
            here, there = room_of(path), room_of(target)
            unknown = [room for room in (here, there) if room not in level | {"__init__": 0}]
            if unknown:
                found.append(f"{path}: {unknown[0]} is in no group")
            elif level.get(there, 0) > level.get(here, 0):
                found.append(f"{path}: {here} imports {target}")
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def room_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path, targets in arrows(sources).items():
        here = room_of(path)
        graph.setdefault(here, set()).update({room_of(target) for target in targets} - {here})
    return graph


# --- the rules hold ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (wide_lines, other_texts()),
        (long_files, python_sources("verl_opd", "tests", "scripts")),
        (long_functions, python_sources("verl_opd", "scripts")),
        (large_records, python_sources("verl_opd", "scripts")),
        (undocumented_fields, python_sources("verl_opd", "scripts")),
        (misplaced_imports, package_sources()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_file_keeps(rule, sources: dict[str, str]) -> None:
    assert [line for path, text in sources.items() for line in rule(path, text)] == []


@pytest.mark.parametrize("rule", [large_rooms, upward_arrows], ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule) -> None:
    assert rule(package_sources()) == []


def test_imports_go_round_neither_between_rooms_nor_between_files() -> None:
    assert cycles(room_graph(package_sources())) == []
    assert cycles(arrows(package_sources())) == []


def test_ruff_enforces_the_width_of_python() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^line-length = (\d+)$", settings, re.MULTILINE) == [str(WIDTH)]
    assert "E" in strings_of("select", settings)
    assert not {"E", "E5", "E501"} & set(strings_of("ignore", settings))
    assert "per-file-ignores" not in settings


def test_init_files_are_empty_except_for_draft_families() -> None:
    filled = {
        path
        for path, text in package_sources().items()
        if path.endswith("__init__.py") and text.strip()
    }
    assert {name for name in filled if not name.startswith("drafts/")} == set()


# --- the rules find what they are for -----------------------------------------------------------

WIDE = "x" * (WIDTH + 1)
BODY = "\n".join(["    pass"] * FUNCTION_LINES)


@pytest.mark.parametrize(
    ("rule", "path", "text", "broken"),
    [
        (wide_lines, "a.sh", WIDE, 1),
        (wide_lines, "a.sh", "x" * WIDTH, 0),
        (wide_lines, "Makefile", f"| {WIDE}\n# {WIDE}", 2),
        (wide_lines, "a.md", f"text {WIDE}", 1),
        (wide_lines, "a.md", f"| {WIDE} |\n# {WIDE}\n[a]({WIDE})\nhttps://{WIDE}", 0),
        (wide_lines, "a.md", f"see [a]({WIDE})", 1),
        (wide_lines, "a.md", f"```bash\n# {WIDE}\n```\n# {WIDE}", 1),
        (long_files, "a.py", "x = 1\n" * FILE_LINES, 0),
        (long_files, "a.py", "x = 1\n" * (FILE_LINES + 1), 1),
        (long_functions, "a.py", f"@d\ndef f():\n{BODY}", 1),
        (long_functions, "a.py", f"class A:\n  async def f(\n    a,\n  ):\n{BODY}", 1),
        (long_functions, "a.py", f"def f():\n{BODY.removesuffix('    pass')}", 0),
    ],
)
def test_widths_and_lengths_are_measured(rule, path: str, text: str, broken: int) -> None:
    assert len(rule(path, text)) == broken


def record(fields: int, decorator: str = "@dataclass") -> str:
    lines = [f"    f{i}: int  # a number" for i in range(fields)]
    return "\n".join([decorator, "class A:", *lines, "    g: ClassVar[int] = 0"])


@pytest.mark.parametrize(
    ("path", "text", "broken"),
    [
        ("a.py", record(POSITIONAL_FIELDS), 0),
        ("a.py", record(POSITIONAL_FIELDS + 1), 1),
        ("a.py", record(POSITIONAL_FIELDS + 1, "@dataclass(frozen=True)"), 1),
        ("a.py", record(FIELDS, "@dataclass(frozen=True, kw_only=True)"), 0),
        ("a.py", record(FIELDS + 1, "@dataclasses.dataclass(kw_only=True)"), 1),
        ("a.py", record(FIELDS + 1), 2),
        ("verl_opd/config/schema.py", record(FIELDS + 1), 0),
        ("a.py", record(FIELDS + 1, "@other"), 0),
    ],
)
def test_records_are_measured(path: str, text: str, broken: int) -> None:
    assert len(large_records(path, text)) == broken


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ("    a: int  # a number", 0),
        ("    # a number\n    a: int", 0),
        ('    a: int\n    """A number."""', 0),
        ("    a: tuple[\n        int\n    ]  # numbers", 0),
        ("    a: Config", 0),
        ("    a: Tensor", 1),
        ("    a: Config | None", 1),
        ("    a: int", 1),
        ('    a: str = "# a number"', 1),
        ("    a: int  # a number\n    b: int", 1),
        ("    # a number\n\n    a: int", 1),
        ("    # numbers\n    a: int\n    b: int", 1),
        ("    a: int\n    x = 1\n    def f(self) -> int: ...", 1),
    ],
)
def test_fields_without_a_word_are_found(fields: str, broken: int) -> None:
    assert len(undocumented_fields("a.py", f"@dataclass\nclass A:\n{fields}\n")) == broken


@pytest.mark.parametrize(
    ("path", "text", "broken"),
    [
        ("opd/plan.py", "def f():\n    import ray", 1),
        ("data/loader.py", "from ray.util import state", 1),
        ("training/worker.py", "import ray", 0),
        ("training/step.py", "import ray", 1),
        ("commands/bench.py", "import ray", 1),
        ("controller/loop.py", "import vllm", 2),
        ("engines/vllm.py", "import vllm", 1),
        ("engines/vllm.py", "def f():\n    from vllm import LLM", 0),
        (
            "engines/vllm.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm import LLM",
            0,
        ),
        ("rollout/server.py", "def f():\n    from vllm import LLM", 1),
        ("config/load.py", "import vllm_plugin", 0),
    ],
)
def test_ray_and_vllm_are_found_outside_of_their_places(path: str, text: str, broken: int) -> None:
    assert len(misplaced_imports(path, text)) == broken


@pytest.mark.parametrize(
    ("path", "text", "broken"),
    [
        ("opd/plan.py", "from verl_opd.opd.trace import VerifyTrace", 0),
        ("opd/plan.py", "from verl_opd.errors import ConfigError", 1),
        ("opd/plan.py", "from ..errors import ConfigError", 1),
        ("opd/plan.py", "from .trace import VerifyTrace", 0),
        ("report/console.py", "def f():\n    from verl_opd.controller import run", 1),
        ("controller/run.py", "from verl_opd.report.console import Console", 0),
        ("controller/run.py", "import verl_opd.cli", 1),
        ("targets/hf.py", "from verl_opd.drafts import base", 0),
        ("cellar/a.py", "from verl_opd.drafts import base", 1),
    ],
)
def test_upward_arrows_are_found(path: str, text: str, broken: int) -> None:
    others = ("opd/trace.py", "errors.py", "controller/run.py", "cli.py", "drafts/base.py")
    sources = {**dict.fromkeys((*others, "report/console.py"), ""), path: text}
    assert len(upward_arrows(sources)) == broken


def test_cycles_are_found_between_files_and_between_rooms() -> None:
    files = {"data/a.py": "from verl_opd.data import b", "data/b.py": "from .a import f"}
    assert cycles(arrows(files)) != []
    assert cycles(room_graph(files)) == []
    rooms = {
        "data/a.py": "from verl_opd.drafts.b import f",
        "drafts/b.py": "",
        "drafts/c.py": "def f():\n    from verl_opd.data.a import g",
    }
    assert cycles(arrows(rooms)) == []
    assert cycles(room_graph(rooms)) != []


def test_large_rooms_are_found_by_count_and_by_share() -> None:
    line = "x = 1\n"
    even = {f"{room}.py": line * 100 for room in "abcdefgh"}
    assert large_rooms(even) == []
    assert len(large_rooms({**even, "a.py": line * 150})) == 1
    many = {f"{i}/x.py": line * (ROOM_STATEMENTS // 2) for i in range(20)}
    assert len(large_rooms({**many, "0/x.py": line * (ROOM_STATEMENTS + 1)}, total=10**6)) == 1
    assert len(large_rooms(many)) == 1, "the package as a whole"
    assert statements('"""Doc."""\nif x:\n    def f(): return 1\n') == 4
