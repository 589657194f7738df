"""Which versions of the Ascend stack fit together, and which this machine has. Standard library
only: it has to work before anything is installed.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

from verl_opd.errors import Finding

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE.parent
ENGINES = ("vllm", "vllm-ascend")
# torch_npu requires torch+cpu on x86-64, which PyPI does not have
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI does not have triton-ascend above 3.2.0
ASCEND_INDEX = "https://mirrors.huaweicloud.com/ascend/repos/pypi"


class Version(NamedTuple):
    """The parts of a version that are compared: 2.9.0.post1+git is ((2, 9, 0), '', 1), 0.21.0rc1
    is ((0, 21, 0), 'rc1', 0).
    """

    release: tuple[int, ...]  # at least three numbers
    pre: str  # rc1 and the like; empty for a release
    post: int  # 0 = none


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """Versions that fit together: one entry of third_party/versions.json."""

    vllm: str  # release, also the name of the row
    vllm_ascend: tuple[str, ...]  # accepted versions, the preferred one first
    git: Mapping[str, str]  # commit or tag that each engine is built from
    torch: str  # version
    torch_npu: tuple[str, ...]  # accepted versions, the preferred one first
    cann: tuple[str, ...]  # accepted versions, the preferred one first
    triton_ascend: str  # version
    transformers: str  # version
    python: str  # bounds, such as >=3.10,<3.13


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has."""

    packages: Mapping[str, str]  # installed version by normalised name
    python: str  # version
    vllm: str | None = None  # version, or the value of $VLLM_VERSION
    cann: str | None = None  # version
    npu_smi: bool = True  # whether npu-smi is on PATH
    nvidia_smi: bool = False  # whether nvidia-smi is on PATH
    project: str | None = None  # folder that verl-opd is installed from, if editable

    @property
    def cuda(self) -> bool:
        """Made for CUDA rather than for NPUs."""
        return self.nvidia_smi and not self.npu_smi


def parse(version: str) -> Version:
    """The version without local (+cpu, +empty) and dev parts; text that is not a version is release
    (0, 0, 0).
    """
    found = re.match(
        r"v?(\d+(?:\.\d+)*)(?:[-._]?(a|b|rc)[-._]?(\d+))?(?:[-._]?post[-._]?(\d+))?",
        version.strip().lower(),
    )
    if found is None:
        return Version((0, 0, 0), "", 0)
    release = tuple(map(int, found[1].split(".")))
    return Version(
        release + (0,) * (3 - len(release)),
        f"{found[2]}{found[3]}" if found[2] else "",
        int(found[4] or 0),
    )


def closeness(found: str, accepted: Collection[str], depth: int = 2) -> str:
    """`same` as an accepted version, `near` (the first `depth` numbers are the same), or `other`.

    >>> closeness("2.10.0.post2", ["2.10.0"])
    'near'
    """
    seen, known = parse(found), [parse(version) for version in accepted]
    if seen in known:
        return "same"
    return (
        "near"
        if seen.release[:depth] in [version.release[:depth] for version in known]
        else "other"
    )


def satisfies(version: str, bounds: str) -> bool:
    """Whether the release is within comma-separated bounds such as `>=2.3,<2.4`; empty bounds
    accept any.
    """
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


def read_table(path: Path | None = None) -> dict[str, VersionRow]:
    """The rows by vLLM release, from the checkout or from the installed package."""
    name = Path("third_party", "versions.json")
    path = path or next(
        (folder / name for folder in (_PACKAGE, ROOT) if (folder / name).is_file()), ROOT / name
    )
    return {key: _row(entry) for key, entry in json.loads(path.read_text(encoding="utf-8")).items()}


def _row(entry: dict[str, Any]) -> VersionRow:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return VersionRow(**fields)


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """This machine, without importing any package. `root`: folder that holds CANN's default
    folders.
    """
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
        # pip may leave ~ame-1.0.dist-info behind
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _editable_folder() -> str | None:
    origin = json.loads(metadata.distribution("verl-opd").read_text("direct_url.json") or "{}")
    return (
        unquote(urlparse(origin["url"]).path)
        if origin.get("dir_info", {}).get("editable")
        else None
    )


def _cann_version(environ: Mapping[str, str], root: Path) -> str | None:
    given = environ.get("ASCEND_TOOLKIT_HOME")
    defaults = [root / "usr/local/Ascend" / name for name in ("ascend-toolkit/latest", "cann")]
    for home in [*([Path(given)] if given else []), *defaults]:
        for file in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
            found = re.search(
                r"^\s*version\s*=\s*(\S+)",
                file.read_text(encoding="utf-8", errors="replace"),
                re.MULTILINE,
            )
            if found:
                return found[1]
    return None


def numbered(version: str | None) -> bool:
    """False for the version that setuptools_scm gives a tree without tags: 0.1.dev1+g1234567."""
    return version is not None and parse(version).release[:2] > (0, 1)


def pick_row(
    table: Mapping[str, VersionRow],
    machine: Machine,
    wanted: str | None = None,
    engines: bool = False,
) -> tuple[VersionRow | None, str]:
    """The row to compare with, and why: `wanted`, else the row of the installed engine (unless
    `engines` are to be built), else that of CANN, else the first. None when the installed engine's
    release is not in the table.
    """
    if wanted:
        return table[wanted], f"--row {wanted}"
    for name, version in (
        ("vllm", machine.vllm),
        ("vllm-ascend", machine.packages.get("vllm-ascend")),
    ):
        if version and numbered(version) and not engines:
            return next(
                (row for row in table.values() if closeness(version, [row.vllm]) != "other"), None
            ), f"{name} {version} is installed"
    for row in table.values():
        if machine.cann and closeness(machine.cann, row.cann) != "other":
            return row, f"CANN {machine.cann} is installed"
    return next(iter(table.values())), "the row that third_party/ holds"


def findings(
    table: Mapping[str, VersionRow], machine: Machine, row: VersionRow | None
) -> list[Finding]:
    """The machine compared with the row."""
    if machine.cuda:
        remedy = "use scripts/install.sh --extras cuda,test; this installer is for Ascend NPUs only"
        return [Finding("device", "error", "nvidia-smi without npu-smi: a CUDA machine", remedy)]
    seen = "npu-smi" if machine.npu_smi else "no npu-smi on PATH"
    device = Finding(
        "device",
        "ok" if machine.npu_smi else "note",
        seen,
        "" if machine.npu_smi else "containers: mount npu-smi and the driver",
    )
    if row is None:
        remedy = (
            f"use a container with vllm {' or '.join(table)}, or build the engines: "
            "./install_npu.sh --engines"
        )
        engine = f"vllm {machine.vllm or machine.packages.get('vllm-ascend')}"
        return [
            device,
            Finding("vllm", "error", f"{engine} has no row in third_party/versions.json", remedy),
        ]
    return [device, *_system(machine, row), *_packages(machine, row)]


def _system(machine: Machine, row: VersionRow) -> Iterator[Finding]:
    good = satisfies(machine.python, row.python)
    yield Finding(
        "python",
        "ok" if good else "error",
        machine.python,
        "" if good else f"use Python {row.python}: PYTHON=/path/to/python ./install_npu.sh",
    )
    if machine.cann is None:
        remedy = (
            "source CANN's set_env.sh, or set ASCEND_TOOLKIT_HOME to the folder that holds "
            "<arch>-linux/ascend_toolkit_install.info"
        )
        yield Finding("cann", "note", "not found", remedy)
    else:
        yield _compared(
            "cann",
            machine.cann,
            row,
            row.cann,
            "",
            f"install CANN {row.cann[0]}, or use {_container(row)}",
        )


def _packages(machine: Machine, row: VersionRow) -> Iterator[Finding]:
    found, container = machine.packages, _container(row)
    by_hand = (
        f"pip install torch=={row.torch} torch-npu=={row.torch_npu[0]} --extra-index-url "
        f"{TORCH_INDEX} in a fresh environment, or use {container}"
    )
    yield _compared("torch", found.get("torch"), row, [row.torch], by_hand, by_hand)
    yield _compared("torch-npu", found.get("torch-npu"), row, row.torch_npu, by_hand, by_hand)
    build = "./install_npu.sh --engines builds the row's"
    if machine.vllm and not numbered(machine.vllm):
        yield Finding(
            "vllm",
            "note",
            f"{machine.vllm}: built without its git tag",
            f"export VLLM_VERSION={row.vllm} if it is that version",
        )
    else:
        yield _compared("vllm", machine.vllm, row, [row.vllm], "./install_npu.sh builds it", build)
    plugin = found.get("vllm-ascend")
    if plugin and not numbered(plugin):
        yield Finding(
            "vllm-ascend",
            "note",
            f"{plugin}: built without its git tag",
            f"must be {' or '.join(row.vllm_ascend)}",
        )
    else:
        yield _compared(
            "vllm-ascend", plugin, row, row.vllm_ascend, "./install_npu.sh builds it", build
        )
    triton = f"pip install --no-deps triton-ascend=={row.triton_ascend} --index-url {ASCEND_INDEX}"
    yield _compared(
        "triton-ascend",
        found.get("triton-ascend"),
        row,
        [row.triton_ascend],
        "./install_npu.sh installs it",
        triton,
    )
    if "triton" in found:
        beside = (
            " beside triton-ascend, which has the same module" if "triton-ascend" in found else ""
        )
        yield Finding(
            "triton",
            "error",
            f"upstream {found['triton']}{beside}",
            "./install_npu.sh removes both and installs triton-ascend",
        )
    pin = f"pip install transformers=={row.transformers}"
    yield _compared(
        "transformers",
        found.get("transformers"),
        row,
        [row.transformers],
        "./install_npu.sh installs it",
        pin,
        depth=1,
    )


def _compared(
    what: str,
    found: str | None,
    row: VersionRow,
    accepted: Collection[str],
    absent: str,
    other: str,
    depth: int = 2,
) -> Finding:
    if found is None:
        return Finding(what, "error", "not installed", absent)
    wanted = " or ".join(accepted)
    near = closeness(found, accepted, depth)
    if near == "other":
        return Finding(what, "error", f"{found}, but vllm {row.vllm} needs {wanted}", other)
    return (
        Finding(what, "ok", found)
        if near == "same"
        else Finding(what, "note", f"{found}; the table has {wanted}")
    )


def _container(row: VersionRow) -> str:
    return f"the container quay.io/ascend/vllm-ascend:v{row.vllm_ascend[-1]} (-a3 for Atlas A3)"
