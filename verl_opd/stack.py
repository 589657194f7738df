"""Which versions of the Ascend stack fit together, what this machine has, and what an installation still needs.

    python verl_opd/stack.py check    a table of what is there; exit 1 when something does not fit
    python verl_opd/stack.py plan     the steps of install_npu.sh, each with its reason, as JSON; exit 1 when it would refuse

Standard library only, and runnable by path: it has to work before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent
ENGINES = ("vllm", "vllm-ascend")
SOC_VERSIONS = "ascend910b1 (Atlas A2), ascend910_9391 (Atlas A3), ascend310p1 (310P)"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # torch_npu asks for torch+cpu on x86-64, which PyPI does not have
_ASCEND_INDEX = "https://mirrors.huaweicloud.com/ascend/repos/pypi"  # triton-ascend above 3.2.0 is nowhere on PyPI
_PINNED = re.compile(r"torch.*|triton.*|vllm.*|transformers|numpy")
_WORDS = {"ok": "ok", "note": "note", "error": "ERROR"}


class Version(NamedTuple):
    """What of a version is compared: 2.9.0.post1+git is ((2, 9, 0), '', 1), 0.21.0rc1 is ((0, 21, 0), 'rc1', 0)."""

    release: tuple[int, ...]
    pre: str
    post: int


@dataclass(frozen=True)
class Row:
    """Versions that fit together: one entry of third_party/versions.json. git: commit or tag each engine is built from."""

    vllm: str
    vllm_ascend: tuple[str, ...]
    git: Mapping[str, str]
    torch: str
    torch_npu: tuple[str, ...]
    cann: tuple[str, ...]
    triton_ascend: str
    transformers: str
    python: str


@dataclass(frozen=True)
class Machine:
    """What is there. packages: installed versions by normalised name. vllm: its version, or what $VLLM_VERSION says instead. project: folder that
    the installed verl-opd is an editable install of."""

    packages: Mapping[str, str]
    python: str
    vllm: str | None = None
    cann: str | None = None
    npu_smi: bool = True
    nvidia_smi: bool = False
    project: str | None = None

    @property
    def cuda(self) -> bool:
        return self.nvidia_smi and not self.npu_smi


@dataclass(frozen=True)
class Finding:
    """What was looked at, `ok`, `note` (worth knowing, stops nothing) or `error`, what was seen, and what to do."""

    what: str
    level: str
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class Step:
    """One command. repairs: names of the findings that are no errors any more after it."""

    name: str
    reason: str
    command: tuple[str, ...]
    repairs: tuple[str, ...] = ()


def parse(version: str) -> Version:
    """Local parts (+cpu, +empty) and dev parts are left out; what is no version at all is release (0, 0, 0)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)(?:[-._]?(a|b|rc)[-._]?(\d+))?(?:[-._]?post[-._]?(\d+))?", version.strip().lower())
    if found is None:
        return Version((0, 0, 0), "", 0)
    release = tuple(map(int, found[1].split(".")))
    return Version(release + (0,) * (3 - len(release)), f"{found[2]}{found[3]}" if found[2] else "", int(found[4] or 0))


def closeness(found: str, accepted: Collection[str], depth: int = 2) -> str:
    """`same` as an accepted version, `near` (its first `depth` numbers are the same), or `other`.

    >>> closeness("2.10.0.post2", ["2.10.0"])
    'near'
    """
    seen, known = parse(found), [parse(version) for version in accepted]
    if seen in known:
        return "same"
    return "near" if seen.release[:depth] in [version.release[:depth] for version in known] else "other"


def satisfies(version: str, bounds: str) -> bool:
    """Whether the release fits comma-separated bounds such as `>=2.3,<2.4`; no bounds fit always."""
    release = parse(version).release
    compare = {
        ">=": release.__ge__,
        "<=": release.__le__,
        "==": release.__eq__,
        "!=": release.__ne__,
        ">": release.__gt__,
        "<": release.__lt__,
    }
    parts = re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", bounds)
    return all(compare[operator](parse(bound).release) for operator, bound in parts)


def read_table(path: Path | None = None) -> dict[str, Row]:
    """The rows by vLLM release, from the checkout or from the installed package."""
    name = Path("third_party", "versions.json")
    path = path or next((folder / name for folder in (_PACKAGE, ROOT) if (folder / name).is_file()), ROOT / name)
    return {key: _row(entry) for key, entry in json.loads(path.read_text(encoding="utf-8")).items()}


def _row(entry: dict[str, Any]) -> Row:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Row(**fields)


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """This machine; nothing that is found is imported. root: below it are CANN's default folders."""
    packages = _installed()
    path = environ.get("PATH")
    return Machine(
        packages=packages,
        python=platform.python_version(),
        vllm=(environ.get("VLLM_VERSION") or packages["vllm"]) if "vllm" in packages else None,
        cann=_cann_version(environ, root),
        npu_smi=shutil.which("npu-smi", path=path) is not None,
        nvidia_smi=shutil.which("nvidia-smi", path=path) is not None,
        project=_editable_folder() if "verl-opd" in packages else None,
    )


def _installed() -> dict[str, str]:
    names, found = set(), {}
    for dist in metadata.distributions():
        with contextlib.suppress(TypeError, KeyError):  # a folder without METADATA
            names.add(re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower())
    for name in sorted(names):
        with contextlib.suppress(metadata.PackageNotFoundError):  # what pip left behind as ~ame-1.0.dist-info
            found[name] = metadata.version(name)
    return found


def _editable_folder() -> str | None:
    origin = json.loads(metadata.distribution("verl-opd").read_text("direct_url.json") or "{}")
    return unquote(urlparse(origin["url"]).path) if origin.get("dir_info", {}).get("editable") else None


def _cann_version(environ: Mapping[str, str], root: Path) -> str | None:
    given = environ.get("ASCEND_TOOLKIT_HOME")
    defaults = [root / "usr/local/Ascend" / name for name in ("ascend-toolkit/latest", "cann")]
    for home in [*([Path(given)] if given else []), *defaults]:
        for file in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
            found = re.search(r"^\s*version\s*=\s*(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if found:
                return found[1]
    return None


def _numbered(version: str | None) -> bool:
    """False for what setuptools_scm calls a tree without tags: 0.1.dev1+g1234567."""
    return version is not None and parse(version).release[:2] > (0, 1)


def pick_row(table: Mapping[str, Row], machine: Machine, wanted: str | None = None, engines: bool = False) -> tuple[Row | None, str]:
    """The row to compare with and why: the wanted one, else that of the engine that is there (unless it is to be built anew), of CANN, the
    first. None: the engine is of a release that the table does not have."""
    if wanted:
        return table[wanted], f"--row {wanted}"
    for name, version in (("vllm", machine.vllm), ("vllm-ascend", machine.packages.get("vllm-ascend"))):
        if version and _numbered(version) and not engines:
            return next(
                (row for row in table.values() if closeness(version, [row.vllm]) != "other"), None
            ), f"{name} {version} is installed"
    for row in table.values():
        if machine.cann and closeness(machine.cann, row.cann) != "other":
            return row, f"CANN {machine.cann} is installed"
    return next(iter(table.values())), "the row that third_party/ holds"


def findings(table: Mapping[str, Row], machine: Machine, row: Row | None) -> list[Finding]:
    """What is there, compared with the row."""
    if machine.cuda:
        remedy = "this installs for Ascend NPUs only: scripts/install.sh --extras cuda,test"
        return [Finding("device", "error", "nvidia-smi without npu-smi: a CUDA machine", remedy)]
    seen = "npu-smi" if machine.npu_smi else "no npu-smi on PATH"
    device = Finding(
        "device", "ok" if machine.npu_smi else "note", seen, "" if machine.npu_smi else "containers: mount npu-smi and the driver"
    )
    if row is None:
        remedy = f"use a container with vllm {' or '.join(table)}, or build the engines: ./install_npu.sh --engines"
        engine = f"vllm {machine.vllm or machine.packages.get('vllm-ascend')}"
        return [device, Finding("vllm", "error", f"{engine} has no row in third_party/versions.json", remedy)]
    return [device, *_system(machine, row), *_packages(machine, row)]


def _system(machine: Machine, row: Row) -> Iterator[Finding]:
    good = satisfies(machine.python, row.python)
    yield Finding(
        "python",
        "ok" if good else "error",
        machine.python,
        "" if good else f"use Python {row.python}: PYTHON=/path/to/python ./install_npu.sh",
    )
    if machine.cann is None:
        remedy = "source CANN's set_env.sh, or set ASCEND_TOOLKIT_HOME to the folder that holds <arch>-linux/ascend_toolkit_install.info"
        yield Finding("cann", "note", "not found", remedy)
    else:
        yield _compared("cann", machine.cann, row, row.cann, "", f"install CANN {row.cann[0]}, or use {_container(row)}")


def _packages(machine: Machine, row: Row) -> Iterator[Finding]:
    found, container = machine.packages, _container(row)
    by_hand = f"pip install torch=={row.torch} torch-npu=={row.torch_npu[0]} --extra-index-url {_TORCH_INDEX} in a fresh environment, or use {container}"
    yield _compared("torch", found.get("torch"), row, [row.torch], by_hand, by_hand)
    yield _compared("torch-npu", found.get("torch-npu"), row, row.torch_npu, by_hand, by_hand)
    build = "./install_npu.sh --engines builds the row's"
    if machine.vllm and not _numbered(machine.vllm):
        yield Finding("vllm", "note", f"{machine.vllm}: built without its git tag", f"export VLLM_VERSION={row.vllm} if that is what it is")
    else:
        yield _compared("vllm", machine.vllm, row, [row.vllm], "./install_npu.sh builds it", build)
    plugin = found.get("vllm-ascend")
    if plugin and not _numbered(plugin):
        yield Finding("vllm-ascend", "note", f"{plugin}: built without its git tag", f"must be {' or '.join(row.vllm_ascend)}")
    else:
        yield _compared("vllm-ascend", plugin, row, row.vllm_ascend, "./install_npu.sh builds it", build)
    triton = f"pip install --no-deps triton-ascend=={row.triton_ascend} --index-url {_ASCEND_INDEX}"
    yield _compared("triton-ascend", found.get("triton-ascend"), row, [row.triton_ascend], "./install_npu.sh installs it", triton)
    if "triton" in found:
        beside = " beside triton-ascend, which owns the same import" if "triton-ascend" in found else ""
        yield Finding("triton", "error", f"upstream {found['triton']}{beside}", "./install_npu.sh removes both and installs triton-ascend")
    pin = f"pip install transformers=={row.transformers}"
    yield _compared("transformers", found.get("transformers"), row, [row.transformers], "./install_npu.sh installs it", pin, depth=1)


def _compared(what: str, found: str | None, row: Row, accepted: Collection[str], absent: str, other: str, depth: int = 2) -> Finding:
    if found is None:
        return Finding(what, "error", "not installed", absent)
    wanted = " or ".join(accepted)
    near = closeness(found, accepted, depth)
    if near == "other":
        return Finding(what, "error", f"{found}, but vllm {row.vllm} goes with {wanted}", other)
    return Finding(what, "ok", found) if near == "same" else Finding(what, "note", f"{found}; the table has {wanted}")


def _container(row: Row) -> str:
    return f"the container quay.io/ascend/vllm-ascend:v{row.vllm_ascend[-1]} (-a3 for Atlas A3)"


def pins(packages: Mapping[str, str], torch_only: bool = False) -> list[str]:
    """Constraints that keep pip from replacing what is there: torch*, triton*, vllm*, transformers, numpy; or torch* alone."""
    kept = re.compile(r"torch.*") if torch_only else _PINNED
    return [f"{name}=={version}" for name, version in sorted(packages.items()) if kept.fullmatch(name)]


def strings_of(key: str, pyproject: str) -> list[str]:
    """The strings of a list in a pyproject.toml, which Python 3.10 has no parser for. Empty when the key is not there."""
    found = re.search(rf"^{key} *= *\[(.*?)\] *$", pyproject, re.MULTILINE | re.DOTALL)
    lines = [line for line in found[1].splitlines() if not line.lstrip().startswith("#")] if found else []
    return [double or single for double, single in re.findall(r'"([^"]+)"|\'([^\']+)\'', "\n".join(lines))]


def missing(packages: Mapping[str, str], requirements: Collection[str]) -> dict[str, str]:
    """Name and bounds, as in `rich>=13`, of what is not there or does not fit -> why. torch is never in it."""
    wanted: dict[str, str] = {}
    for requirement in requirements:
        name = re.split(r"[ <>=!]", requirement, maxsplit=1)[0]
        bounds = requirement[len(name) :].strip()
        if name == "torch":
            continue
        if name not in packages:
            wanted[requirement] = f"{name} is missing"
        elif not satisfies(packages[name], bounds):
            wanted[requirement] = f"{name} {packages[name]} is not {bounds}"
    return wanted


@dataclass(frozen=True)
class Planner:
    """Makes the steps. root: the checkout. python: what runs pip. scratch: folder for constraint files. engines: build them though they are there."""

    machine: Machine
    row: Row
    root: Path
    python: str
    scratch: str
    engines: bool = False

    def steps(self) -> list[Step]:
        return [*self._engine_steps(), *self._triton_steps(), *self._project_steps()]

    def builds(self) -> list[str]:
        """Engines to build, in order."""
        return [name for name in ENGINES if self.engines or name not in self.machine.packages]

    def _pip(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", "pip", *arguments)

    def _stack(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "verl_opd/stack.py", *arguments)

    def _engine_steps(self) -> Iterator[Step]:
        builds = self.builds()
        if not builds:
            return
        reason = "asked for with --engines" if self.engines else " and ".join(builds) + (" are" if builds[1:] else " is") + " not installed"
        folders = [f"third_party/{name}" for name in builds]
        yield Step("fetch engines", reason, ("git", "submodule", "update", "--init", *folders))
        for name in builds:
            yield from self._checkout(name)
        constraints, tools = f"{self.scratch}/torch.txt", f"{self.scratch}/build.txt"
        yield Step("pin torch", "pip may not replace torch or torch_npu", self._stack("pins", "--torch-only", "--out", constraints))
        why = "engines are built against the installed torch, not in an environment of their own"
        yield Step("list build tools", why, self._stack("build-requires", *folders, "--out", tools))
        yield Step(
            "build tools", "what the engines' pyproject.toml ask for, except torch", self._pip("install", "-r", tools, "-c", constraints)
        )
        if "vllm" in builds:
            variables = ("VLLM_TARGET_DEVICE=empty", *_scm_version(self.row.vllm))
            yield Step("vllm", reason, ("env", *variables, *self._build("vllm", constraints)), repairs=("vllm", "transformers"))
            remove = self._pip("uninstall", "--yes", "triton")
            yield Step("remove triton", "vllm's dependencies bring upstream triton, which does not work on NPUs", remove)
        if "vllm-ascend" in builds:
            variables = ("COMPILE_CUSTOM_KERNELS=1", *_scm_version(self.row.vllm_ascend[0]))
            yield Step("vllm-ascend", reason, ("env", *variables, *self._build("vllm-ascend", constraints)), repairs=("vllm-ascend",))

    def _build(self, name: str, constraints: str) -> tuple[str, ...]:
        indexes = ("--extra-index-url", _TORCH_INDEX, "--extra-index-url", _ASCEND_INDEX)
        return self._pip("install", "--no-build-isolation", "-c", constraints, *indexes, "-e", f"third_party/{name}")

    def _checkout(self, name: str) -> Iterator[Step]:
        ref, folder = self.row.git[name.replace("-", "_")], f"third_party/{name}"
        if not re.fullmatch(r"[0-9a-f]{40}", ref):
            reason = f"vllm {self.row.vllm} goes with {name} {ref}; the submodule is at another commit"
            yield Step(f"fetch {name} {ref}", reason, ("git", "-C", folder, "fetch", "--depth", "1", "origin", "tag", ref))
            yield Step(f"check out {name} {ref}", reason, ("git", "-C", folder, "checkout", "--detach", ref))
        if name == "vllm-ascend":
            command = ("git", "-C", folder, "submodule", "update", "--init", "--recursive")
            yield Step("fetch kernels", "vllm-ascend keeps kernel sources in submodules", command)

    def _triton_steps(self) -> Iterator[Step]:
        packages, reason = self.machine.packages, "it is missing"
        if "triton" in packages or self.builds():
            reason = (
                f"upstream triton {packages['triton']} is installed"
                if "triton" in packages
                else "the engines' dependencies bring upstream triton"
            )
            remove = self._pip("uninstall", "--yes", "triton", "triton-ascend")
            yield Step("remove both tritons", f"{reason}, and both write the same files", remove, repairs=("triton",))
            reason = "it was just removed"
        elif "triton-ascend" in packages:
            return
        install = self._pip("install", "--no-deps", "--index-url", _ASCEND_INDEX, f"triton-ascend=={self.row.triton_ascend}")
        yield Step("triton-ascend", f"{reason}; PyPI does not have {self.row.triton_ascend}", install, repairs=("triton-ascend",))

    def _project_steps(self) -> Iterator[Step]:
        here, there = self.root.resolve(), self.machine.project
        if there is None or Path(there).resolve() != here:
            reason = f"verl-opd is installed from {there}" if there else "verl-opd is not installed from this folder"
            yield Step("verl-opd", f"{reason}; without dependencies, torch is one", self._pip("install", "--no-deps", "-e", "."))
        wanted = missing(self.machine.packages, strings_of("dependencies", (self.root / "pyproject.toml").read_text(encoding="utf-8")))
        repairs = ("transformers",) if "transformers" in wanted else ()
        if repairs:
            reason = wanted.pop("transformers")
            if "vllm" not in self.builds():  # whose dependency it is
                wanted[f"transformers=={self.row.transformers}"] = reason
        if wanted:
            file = f"{self.scratch}/constraints.txt"
            yield Step("pin all", "pip may not replace torch*, triton*, vllm*, transformers or numpy", self._stack("pins", "--out", file))
            yield Step("dependencies", ", ".join(wanted.values()), self._pip("install", "-c", file, *wanted), repairs)


def _scm_version(version: str) -> tuple[str, ...]:
    return (f"SETUPTOOLS_SCM_PRETEND_VERSION={version}",)  # the submodules are shallow, without tags


def refusals(seen: Collection[Finding], steps: Collection[Step], planner: Planner | None, environ: Mapping[str, str]) -> list[Finding]:
    """Errors that no step repairs, and what building the engines needs and is not there."""
    repaired = {name for step in steps for name in step.repairs}
    refused = [finding for finding in seen if finding.level == "error" and finding.what not in repaired]
    builds = planner.builds() if planner else []
    if planner is None or not builds:
        return refused
    if "vllm-ascend" in builds and not environ.get("SOC_VERSION"):
        remedy = f"export SOC_VERSION=..., one of {SOC_VERSIONS}"
        refused.append(Finding("SOC_VERSION", "error", "not set; vllm-ascend is compiled for one chip", remedy))
    if planner.machine.cann is None:
        refused.append(
            Finding(
                "cann", "error", "not found; the engines are compiled with it", f"install CANN {planner.row.cann[0]}, source its set_env.sh"
            )
        )
    if not (planner.root / ".git").exists():
        refused.append(Finding("git", "error", f"{planner.root} is no git clone; the engines are submodules", "git clone the repository"))
    return refused


def _parser(table: Mapping[str, Row]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stack.py", description="Versions of the Ascend stack: what is there, what fits, what is missing."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check, plan = (
        commands.add_parser("check", help="compare and print a table"),
        commands.add_parser("plan", help="the steps of an installation"),
    )
    for command in (check, plan):
        command.add_argument("--row", choices=list(table), help="compare with this row instead of the one of the installed vllm")
        command.add_argument("--root", type=Path, default=Path("/"), help="folder below which CANN's default folders are")
    plan.add_argument("--engines", action="store_true", help="build the engines though they are installed")
    plan.add_argument("--python", default=sys.executable, help="interpreter of the steps")
    plan.add_argument("--scratch", default="/tmp", help="folder for constraint files")
    plan.add_argument("--shell", action="store_true", help="tab-separated name, reason and shell command instead of JSON")
    pin = commands.add_parser("pins", help="constraints of what is installed")
    pin.add_argument("--torch-only", action="store_true")
    build = commands.add_parser("build-requires", help="what source trees need to be built, without torch and triton")
    build.add_argument("folders", nargs="+", type=Path)
    for command in (pin, build):
        command.add_argument("--out", type=Path, help="file instead of the standard output")
    return parser


def _check(options: argparse.Namespace, table: Mapping[str, Row]) -> int:
    machine = detect(os.environ, options.root)
    row, why = pick_row(table, machine, options.row)
    seen = findings(table, machine, row)
    print(f"Ascend stack, vllm {row.vllm if row else 'unknown'} ({why})")
    for finding in seen:
        print(f"{_WORDS[finding.level]:<7}{finding.what:<15}{finding.seen}")
        if finding.remedy:
            print(f"{'':<22}-> {finding.remedy}")
    bad = [finding.what for finding in seen if finding.level == "error"]
    print(f"does not fit: {', '.join(bad)}" if bad else "fits")
    return 1 if bad else 0


def _plan(options: argparse.Namespace, table: Mapping[str, Row]) -> int:
    if not (ROOT / "pyproject.toml").is_file():
        sys.exit(f"stack.py: error: {ROOT} is no checkout; a plan installs from one: clone the repository")
    machine = detect(os.environ, options.root)
    row, why = pick_row(table, machine, options.row, options.engines)
    planner = Planner(machine, row, ROOT, options.python, options.scratch, options.engines) if row and not machine.cuda else None
    seen, steps = findings(table, machine, row), planner.steps() if planner else []
    refused = refusals(seen, steps, planner, os.environ)
    if options.shell:
        print(f"install_npu: for vllm {row.vllm if row else 'unknown'} ({why})", file=sys.stderr)
        for step in steps:
            print(step.name, step.reason, shlex.join(step.command), sep="\t")
        for finding in refused:
            print(f"install_npu: error: {finding.what}: {finding.seen}\n    -> {finding.remedy}", file=sys.stderr)
    else:
        found = {"row": row.vllm if row else None, "because": why, "findings": list(map(asdict, seen))}
        print(json.dumps({**found, "steps": list(map(asdict, steps)), "refused": list(map(asdict, refused))}, indent=2))
    return 1 if refused else 0


def _lines(options: argparse.Namespace) -> list[str]:
    if options.command == "pins":
        return pins(detect(os.environ).packages, options.torch_only)
    asked = [line for folder in options.folders for line in strings_of("requires", (folder / "pyproject.toml").read_text(encoding="utf-8"))]
    return [line for line in dict.fromkeys(asked) if not re.match(r"(torch|triton)", line)]


def main(argv: list[str] | None = None) -> int:
    table = read_table()
    options = _parser(table).parse_args(argv)
    if options.command == "check":
        return _check(options, table)
    if options.command == "plan":
        return _plan(options, table)
    text = "".join(f"{line}\n" for line in _lines(options))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
