"""The plan of install_npu.sh: compares the Ascend stack of this machine with
third_party/versions.json and lists the missing steps, the versions that pip must keep and the
packages that building the engines needs.

    python scripts/npu_plan.py check
        a table; exit 1 when something does not fit
    python scripts/npu_plan.py plan [--shell]
        the steps, each with its reason; exit 1 when an installation is not possible

Standard library only: it has to work before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl_opd.ascend.versions import (  # noqa: E402 (from this checkout, installed or not)
    ASCEND_INDEX,
    ENGINES,
    TORCH_INDEX,
    Machine,
    VersionRow,
    detect,
    findings,
    pick_row,
    read_table,
    satisfies,
)
from verl_opd.errors import Finding  # noqa: E402

SOC_VERSIONS = "ascend910b1 (Atlas A2), ascend910_9391 (Atlas A3), ascend310p1 (310P)"
_PINNED = re.compile(r"torch.*|triton.*|vllm.*|transformers|numpy")


@dataclass(frozen=True)
class Step:
    """One command of an installation."""

    name: str  # as printed
    reason: str  # why the step is needed
    command: tuple[str, ...]  # program and arguments
    repairs: tuple[str, ...] = ()  # findings (by `what`) that are no longer errors after it


def pins(packages: Mapping[str, str], torch_only: bool = False) -> list[str]:
    """Constraints that keep pip from replacing torch*, triton*, vllm*, transformers and numpy, or
    torch* alone.
    """
    kept = re.compile(r"torch.*") if torch_only else _PINNED
    return [
        f"{name}=={version}" for name, version in sorted(packages.items()) if kept.fullmatch(name)
    ]


def strings_of(key: str, pyproject: str) -> list[str]:
    """The strings of the list `key` in a pyproject.toml; empty without that key. Python 3.10 has no
    parser for such files.
    """
    found = re.search(rf"^{key} *= *\[(.*?)\] *$", pyproject, re.MULTILINE | re.DOTALL)
    lines = (
        [line for line in found[1].splitlines() if not line.lstrip().startswith("#")]
        if found
        else []
    )
    return [
        double or single
        for double, single in re.findall(r'"([^"]+)"|\'([^\']+)\'', "\n".join(lines))
    ]


def missing(packages: Mapping[str, str], requirements: Collection[str]) -> dict[str, str]:
    """Requirements such as `rich>=13` that are not installed or do not fit -> why. torch is never
    among them.
    """
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


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the steps of an installation."""

    machine: Machine  # as found
    row: VersionRow  # versions to install
    root: Path  # the checkout
    python: str  # interpreter that runs pip
    scratch: str  # folder for constraint files
    engines: bool = False  # build the engines even if they are installed

    def steps(self) -> list[Step]:
        return [*self._engine_steps(), *self._triton_steps(), *self._project_steps()]

    def builds(self) -> list[str]:
        """Engines to build, in order."""
        return [name for name in ENGINES if self.engines or name not in self.machine.packages]

    def _pip(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", "pip", *arguments)

    def _stack(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "scripts/npu_plan.py", *arguments)

    def _engine_steps(self) -> Iterator[Step]:
        builds = self.builds()
        if not builds:
            return
        reason = (
            "requested with --engines"
            if self.engines
            else " and ".join(builds) + (" are" if builds[1:] else " is") + " not installed"
        )
        folders = [f"third_party/{name}" for name in builds]
        yield Step("fetch engines", reason, ("git", "submodule", "update", "--init", *folders))
        for name in builds:
            yield from self._checkout(name)
        constraints, tools = f"{self.scratch}/torch.txt", f"{self.scratch}/build.txt"
        also = ("--also", f"transformers=={self.row.transformers}")
        why = "pip must not replace torch or torch_npu, and must install the row's transformers"
        yield Step(
            "pin torch", why, self._stack("pins", "--torch-only", *also, "--out", constraints)
        )
        why = "engines are built against the installed torch, not in an isolated environment"
        yield Step("list build tools", why, self._stack("build-requires", *folders, "--out", tools))
        yield Step(
            "build tools",
            "what the engines' pyproject.toml require, except torch",
            self._pip("install", "-r", tools, "-c", constraints),
        )
        if "vllm" in builds:
            variables = ("VLLM_TARGET_DEVICE=empty", *_scm_version(self.row.vllm))
            yield Step(
                "vllm",
                reason,
                ("env", *variables, *self._build("vllm", constraints)),
                repairs=("vllm", "transformers"),
            )
            remove = self._pip("uninstall", "--yes", "triton")
            yield Step(
                "remove triton",
                "vllm's dependencies bring upstream triton, which does not work on NPUs",
                remove,
            )
        if "vllm-ascend" in builds:
            variables = ("COMPILE_CUSTOM_KERNELS=1", *_scm_version(self.row.vllm_ascend[0]))
            yield Step(
                "vllm-ascend",
                reason,
                ("env", *variables, *self._build("vllm-ascend", constraints)),
                repairs=("vllm-ascend",),
            )

    def _build(self, name: str, constraints: str) -> tuple[str, ...]:
        indexes = ("--extra-index-url", TORCH_INDEX, "--extra-index-url", ASCEND_INDEX)
        return self._pip(
            "install",
            "--no-build-isolation",
            "-c",
            constraints,
            *indexes,
            "-e",
            f"third_party/{name}",
        )

    def _checkout(self, name: str) -> Iterator[Step]:
        ref, folder = self.row.git[name.replace("-", "_")], f"third_party/{name}"
        if not re.fullmatch(r"[0-9a-f]{40}", ref):
            reason = f"vllm {self.row.vllm} needs {name} {ref}; the submodule is at another commit"
            yield Step(
                f"fetch {name} {ref}",
                reason,
                ("git", "-C", folder, "fetch", "--depth", "1", "origin", "tag", ref),
            )
            yield Step(
                f"check out {name} {ref}",
                reason,
                ("git", "-C", folder, "checkout", "--detach", ref),
            )
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
            yield Step(
                "remove both tritons",
                f"{reason}, and both write the same files",
                remove,
                repairs=("triton",),
            )
            reason = "it was just removed"
        elif "triton-ascend" in packages:
            return
        install = self._pip(
            "install",
            "--no-deps",
            "--index-url",
            ASCEND_INDEX,
            f"triton-ascend=={self.row.triton_ascend}",
        )
        yield Step(
            "triton-ascend",
            f"{reason}; PyPI does not have {self.row.triton_ascend}",
            install,
            repairs=("triton-ascend",),
        )

    def _project_steps(self) -> Iterator[Step]:
        here, there = self.root.resolve(), self.machine.project
        if there is None or Path(there).resolve() != here:
            reason = (
                f"verl-opd is installed from {there}"
                if there
                else "verl-opd is not installed from this folder"
            )
            yield Step(
                "verl-opd",
                f"{reason}; without dependencies, because torch is one of them",
                self._pip("install", "--no-deps", "-e", "."),
            )
        wanted = missing(
            self.machine.packages,
            strings_of("dependencies", (self.root / "pyproject.toml").read_text(encoding="utf-8")),
        )
        repairs = ("transformers",) if "transformers" in wanted else ()
        if repairs:
            reason = wanted.pop("transformers")
            if "vllm" not in self.builds():  # building vllm installs it
                wanted[f"transformers=={self.row.transformers}"] = reason
        if wanted:
            file = f"{self.scratch}/constraints.txt"
            yield Step(
                "pin all",
                "pip must not replace torch*, triton*, vllm*, transformers or numpy",
                self._stack("pins", "--out", file),
            )
            yield Step(
                "dependencies",
                ", ".join(wanted.values()),
                self._pip("install", "-c", file, *wanted),
                repairs,
            )


def _scm_version(version: str) -> tuple[str, ...]:
    # the submodules are shallow, without tags
    return (f"SETUPTOOLS_SCM_PRETEND_VERSION={version}",)


def blocking_errors(
    seen: Collection[Finding],
    steps: Collection[Step],
    planner: Planner | None,
    environ: Mapping[str, str],
) -> list[Finding]:
    """Errors that no step repairs, and what building the engines still needs."""
    repaired = {name for step in steps for name in step.repairs}
    blocking = [
        finding for finding in seen if finding.level == "error" and finding.what not in repaired
    ]
    builds = planner.builds() if planner else []
    if planner is None or not builds:
        return blocking
    if "vllm-ascend" in builds and not environ.get("SOC_VERSION"):
        remedy = f"export SOC_VERSION=..., one of {SOC_VERSIONS}"
        blocking.append(
            Finding("SOC_VERSION", "error", "not set; vllm-ascend is compiled for one chip", remedy)
        )
    if planner.machine.cann is None:
        blocking.append(
            Finding(
                "cann",
                "error",
                "not found; the engines are compiled with it",
                f"install CANN {planner.row.cann[0]}, source its set_env.sh",
            )
        )
    if not (planner.root / ".git").exists():
        blocking.append(
            Finding(
                "git",
                "error",
                f"{planner.root} is not a git clone; the engines are submodules",
                "git clone the repository",
            )
        )
    return blocking


def _parser(table: Mapping[str, VersionRow]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npu_plan.py", description="Plan the installation on a machine with Ascend NPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="the steps of an installation")
    for command in (commands.add_parser("check", help="compare and print a table"), plan):
        command.add_argument(
            "--row",
            choices=list(table),
            help="compare with this row instead of the one of the installed vllm",
        )
        command.add_argument(
            "--root",
            type=Path,
            default=Path("/"),
            help="folder that contains CANN's default folders",
        )
    plan.add_argument(
        "--engines", action="store_true", help="build the engines even if they are installed"
    )
    plan.add_argument("--python", default=sys.executable, help="interpreter of the steps")
    plan.add_argument("--scratch", default="/tmp", help="folder for constraint files")
    plan.add_argument(
        "--shell",
        action="store_true",
        help="tab-separated name, reason and shell command instead of JSON",
    )
    pin = commands.add_parser("pins", help="constraints that keep the installed versions")
    pin.add_argument("--torch-only", action="store_true")
    pin.add_argument("--also", action="append", default=[], help="a further constraint")
    build = commands.add_parser(
        "build-requires", help="packages that building source trees needs, without torch and triton"
    )
    build.add_argument("folders", nargs="+", type=Path)
    for command in (pin, build):
        command.add_argument("--out", type=Path, help="file instead of the standard output")
    return parser


def _check(options: argparse.Namespace, table: Mapping[str, VersionRow]) -> int:
    machine = detect(os.environ, options.root)
    row, why = pick_row(table, machine, options.row)
    seen = findings(table, machine, row)
    print(f"Ascend stack, vllm {row.vllm if row else 'unknown'} ({why})")
    for finding in seen:
        print(f"{finding.level.replace('error', 'ERROR'):<7}{finding.what:<15}{finding.seen}")
        if finding.remedy:
            print(f"{'':<22}-> {finding.remedy}")
    bad = [finding.what for finding in seen if finding.level == "error"]
    print(f"does not fit: {', '.join(bad)}" if bad else "fits")
    return 1 if bad else 0


def _plan(options: argparse.Namespace, table: Mapping[str, VersionRow]) -> int:
    machine = detect(os.environ, options.root)
    row, why = pick_row(table, machine, options.row, options.engines)
    planner = (
        Planner(
            machine=machine,
            row=row,
            root=ROOT,
            python=options.python,
            scratch=options.scratch,
            engines=options.engines,
        )
        if row and not machine.cuda
        else None
    )
    seen, steps = findings(table, machine, row), planner.steps() if planner else []
    blocking = blocking_errors(seen, steps, planner, os.environ)
    if options.shell:
        print(f"install_npu: for vllm {row.vllm if row else 'unknown'} ({why})", file=sys.stderr)
        for step in steps:
            print(step.name, step.reason, shlex.join(step.command), sep="\t")
        for finding in blocking:
            print(
                f"install_npu: error: {finding.what}: {finding.seen}\n    -> {finding.remedy}",
                file=sys.stderr,
            )
    else:
        found = {
            "row": row.vllm if row else None,
            "because": why,
            "findings": list(map(asdict, seen)),
        }
        print(
            json.dumps(
                {
                    **found,
                    "steps": list(map(asdict, steps)),
                    "blocking": list(map(asdict, blocking)),
                },
                indent=2,
            )
        )
    return 1 if blocking else 0


def _lines(options: argparse.Namespace) -> list[str]:
    if options.command == "pins":
        return [*pins(detect(os.environ).packages, options.torch_only), *options.also]
    required = [
        line
        for folder in options.folders
        for line in strings_of("requires", (folder / "pyproject.toml").read_text(encoding="utf-8"))
    ]
    return [line for line in dict.fromkeys(required) if not re.match(r"(torch|triton)", line)]


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
