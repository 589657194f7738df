"""The table of Ascend versions, how a machine is looked at, and what is made of the difference."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import npu_plan
from scripts.npu_plan import Planner, blocking_errors, missing, pins, strings_of
from verl_opd.ascend import versions as stack
from verl_opd.ascend.versions import (
    Machine,
    closeness,
    detect,
    findings,
    parse,
    pick_row,
    read_table,
    satisfies,
)

ROOT = Path(__file__).parents[3]
TABLE = read_table()
FITS = Machine(
    packages={
        "vllm": "0.21.0+empty",
        "vllm-ascend": "0.21.0rc1",
        "torch": "2.10.0+cpu",
        "torch-npu": "2.10.0",
        "triton-ascend": "3.2.1",
        "transformers": "5.5.4",
        "numpy": "1.26.4",
    },
    python="3.11.7",
    vllm="0.21.0+empty",
    cann="9.0.0",
)


def _with(machine: Machine = FITS, **packages: str | None) -> Machine:
    """The machine with other packages; None takes one away, _ stands for -."""
    changed = {name.replace("_", "-"): version for name, version in packages.items()}
    kept = {
        name: version
        for name, version in {**machine.packages, **changed}.items()
        if version is not None
    }
    return dataclasses.replace(machine, packages=kept, vllm=kept.get("vllm"))


def _levels(machine: Machine, row: str = "0.21.0") -> dict[str, str]:
    return {finding.what: finding.level for finding in findings(TABLE, machine, TABLE[row])}


def _odd(machine: Machine, row: str = "0.21.0") -> dict[str, str]:
    return {name: level for name, level in _levels(machine, row).items() if level != "ok"}


@pytest.mark.parametrize(
    ("version", "parsed"),
    [
        ("0.21.0+empty", ((0, 21, 0), "", 0)),
        ("v0.21.0rc1", ((0, 21, 0), "rc1", 0)),
        ("2.10.0.post4", ((2, 10, 0), "", 4)),
        ("2.9.0.post1+git1234abc", ((2, 9, 0), "", 1)),
        ("2.10", ((2, 10, 0), "", 0)),
        ("9.0.RC1", ((9, 0, 0), "rc1", 0)),
        ("3.2.0.dev20260104", ((3, 2, 0), "", 0)),
        ("unknown", ((0, 0, 0), "", 0)),
    ],
)
def test_versions_are_read_without_their_local_part(
    version: str, parsed: tuple[object, ...]
) -> None:
    assert parse(version) == parsed


@pytest.mark.parametrize(
    ("found", "accepted", "depth", "answer"),
    [
        ("0.21.0+empty", ["0.21.0"], 2, "same"),
        ("0.23.0.post1", ["0.23.0", "0.23.0.post1"], 2, "same"),
        ("2.10.0.post2", ["2.10.0.post4"], 2, "near"),
        ("2.10.1", ["2.10.0"], 2, "near"),
        ("2.9.0", ["2.10.0"], 2, "other"),
        ("0.21.0", ["0.21.0rc1"], 2, "near"),
        ("5.10.4", ["5.5.4"], 2, "other"),
        ("5.10.4", ["5.5.4"], 1, "near"),
        ("4.57.4", ["5.5.4"], 1, "other"),
    ],
)
def test_closeness(found: str, accepted: list[str], depth: int, answer: str) -> None:
    assert closeness(found, accepted, depth) == answer


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("3.12.4", ">=3.10,<3.13", True),
        ("3.13.0", ">=3.10,<3.13", False),
        ("3.9.1", ">=3.10,<3.13", False),
        ("2.40", ">=2.40", True),
        ("1.3.2", "==1.3.2", True),
        ("1.3.2", "!=1.3.2", False),
        ("1.3.2", "<=1.3,>1", False),
        ("0.1", "", True),
    ],
)
def test_bounds(version: str, bounds: str, fits: bool) -> None:
    assert satisfies(version, bounds) is fits


def test_the_table_is_whole_and_its_first_row_is_what_the_submodules_hold() -> None:
    assert list(TABLE) == [row.vllm for row in TABLE.values()] == ["0.21.0", "0.23.0"]
    for row in TABLE.values():
        assert set(row.git) == {"vllm", "vllm_ascend"}
        assert all(closeness(plugin, [row.vllm]) != "other" for plugin in row.vllm_ascend)
        assert closeness(row.torch_npu[0], [row.torch]) != "other"
    done = subprocess.run(
        ["git", "ls-files", "-s", "third_party"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    links = dict(re.findall(r"^160000 (\w+) \d\tthird_party/(\S+)$", done.stdout, re.MULTILINE))
    first = next(iter(TABLE.values()))
    assert {name: commit for commit, name in links.items()} == {
        "vllm": first.git["vllm"],
        "vllm-ascend": first.git["vllm_ascend"],
    }


def test_the_table_is_found_in_an_installed_package_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_party").mkdir()
    (tmp_path / "third_party" / "versions.json").write_text(
        json.dumps({"9.9.0": dataclasses.asdict(TABLE["0.21.0"])})
    )
    monkeypatch.setattr(stack, "_PACKAGE", tmp_path)
    assert list(read_table()) == ["9.9.0"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert "third_party/versions.json" in strings_of("only-include", pyproject)
    assert '"third_party" = "verl_opd/third_party"' in pyproject
    assert "/third_party/versions.json" in strings_of("include", pyproject)


def _dist(site: Path, folder: str, name: str, version: str) -> Path:
    path = site / f"{folder}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return path


def test_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, later = tmp_path / "site", tmp_path / "later"
    for folder, name, version in (
        ("torch_npu", "torch_npu", "2.10.0"),
        ("vllm_ascend", "vllm-ascend", "0.21.0rc1"),
        ("vllm", "vllm", "0.21.0+empty"),
    ):
        _dist(site, folder, name, version)
    _dist(site, "~orch", "torch", "2.9.0")  # what an interrupted pip leaves behind
    (site / "empty-1.0.dist-info").mkdir()
    _dist(later, "vllm", "vllm", "0.18.0")
    project = _dist(site, "verl_opd", "verl-opd", "0.1.0")
    (project / "direct_url.json").write_text(
        '{"url": "file:///somewhere/verl%20opd", "dir_info": {"editable": true}}'
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npu-smi").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "npu-smi").chmod(0o755)
    monkeypatch.setattr(sys, "path", [str(site), str(later)])
    machine = detect({"PATH": str(tmp_path / "bin")}, tmp_path)
    packages = {
        "torch-npu": "2.10.0",
        "vllm": "0.21.0+empty",
        "vllm-ascend": "0.21.0rc1",
        "verl-opd": "0.1.0",
    }
    assert {
        name: version for name, version in machine.packages.items() if name != "empty"
    } == packages
    assert (machine.vllm, machine.cann, machine.project) == (
        "0.21.0+empty",
        None,
        "/somewhere/verl opd",
    )
    assert machine.npu_smi
    assert not machine.nvidia_smi
    assert not machine.cuda
    (project / "direct_url.json").write_text(
        '{"url": "https://example.org/x.whl", "archive_info": {}}'
    )
    other = detect({"PATH": "", "VLLM_VERSION": "0.23.0"}, tmp_path)
    assert (other.vllm, other.project, other.npu_smi) == ("0.23.0", None, False)


@pytest.mark.parametrize(
    "folder", ["usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "opt/cann"]
)
def test_cann_is_found_where_it_says_or_where_it_usually_is(tmp_path: Path, folder: str) -> None:
    info = tmp_path / folder / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100\n")
    environ = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "opt/cann")}
    assert detect(environ, tmp_path).cann == "9.1.0"


@pytest.mark.parametrize(
    ("machine", "wanted", "engines", "row", "why"),
    [
        (FITS, None, False, "0.21.0", "vllm 0.21.0+empty is installed"),
        (FITS, "0.23.0", False, "0.23.0", "--row 0.23.0"),
        (_with(vllm="0.23.1"), None, False, "0.23.0", "vllm 0.23.1 is installed"),
        (_with(vllm="0.30.0"), None, False, None, "vllm 0.30.0 is installed"),
        (_with(vllm="0.30.0"), None, True, "0.21.0", "CANN 9.0.0 is installed"),
        (
            _with(vllm="0.1.dev1+gad7125a43.empty"),
            None,
            False,
            "0.21.0",
            "vllm-ascend 0.21.0rc1 is installed",
        ),
        (_with(vllm=None, vllm_ascend=None), None, False, "0.21.0", "CANN 9.0.0 is installed"),
        (
            Machine(packages={}, python="3.11.7", cann="9.1.0"),
            None,
            False,
            "0.23.0",
            "CANN 9.1.0 is installed",
        ),
        (
            Machine(packages={}, python="3.11.7"),
            None,
            False,
            "0.21.0",
            "the row that third_party/ holds",
        ),
    ],
)
def test_the_row(
    machine: Machine, wanted: str | None, engines: bool, row: str | None, why: str
) -> None:
    assert pick_row(TABLE, machine, wanted, engines) == (TABLE[row] if row else None, why)


def test_what_fits_has_nothing_to_say() -> None:
    assert _odd(FITS) == {}
    second = _with(
        vllm="0.23.0", vllm_ascend="0.23.0.post1", torch_npu="2.10.0.post4", triton_ascend="3.2.2"
    )
    assert _odd(dataclasses.replace(second, cann="9.1.0"), "0.23.0") == {}


@pytest.mark.parametrize(
    ("machine", "odd"),
    [
        (_with(torch="2.11.0"), {"torch": "error"}),
        (_with(torch="2.10.1", torch_npu="2.10.0.post4"), {"torch": "note", "torch-npu": "note"}),
        (_with(torch=None), {"torch": "error"}),
        (_with(vllm="0.21.1"), {"vllm": "note"}),
        (_with(vllm_ascend="0.23.0"), {"vllm-ascend": "error"}),
        (
            _with(vllm="0.1.dev1+g12", vllm_ascend="0.1.dev2+g34"),
            {"vllm": "note", "vllm-ascend": "note"},
        ),
        (_with(triton="3.5.0"), {"triton": "error"}),
        (_with(triton="3.5.0", triton_ascend=None), {"triton": "error", "triton-ascend": "error"}),
        (_with(transformers="5.10.4"), {"transformers": "note"}),
        (_with(transformers="4.57.4"), {"transformers": "error"}),
        (dataclasses.replace(FITS, cann=None), {"cann": "note"}),
        (dataclasses.replace(FITS, cann="9.1.0"), {"cann": "error"}),
        (dataclasses.replace(FITS, python="3.13.1"), {"python": "error"}),
        (dataclasses.replace(FITS, npu_smi=False), {"device": "note"}),
        (dataclasses.replace(FITS, npu_smi=False, nvidia_smi=True), {"device": "error"}),
        (dataclasses.replace(FITS, nvidia_smi=True), {}),
    ],
)
def test_what_does_not_fit(machine: Machine, odd: dict[str, str]) -> None:
    assert _odd(machine) == odd
    seen = findings(TABLE, machine, TABLE["0.21.0"])
    assert all(finding.remedy for finding in seen if finding.level == "error")


def test_an_engine_without_a_row_is_named_with_the_rows_there_are() -> None:
    device, engine = findings(TABLE, _with(vllm="0.30.0"), None)
    assert device.level == "ok"
    assert engine.seen == "vllm 0.30.0 has no row in third_party/versions.json"
    assert "0.21.0 or 0.23.0" in engine.remedy


def test_pins() -> None:
    packages = {
        "torchvision": "0.25.0",
        "rich": "14",
        "numpy": "2.1",
        "torch": "2.10.0+cpu",
        "triton-ascend": "3.2.1",
        "numpydoc": "1",
    }
    assert pins(packages) == [
        "numpy==2.1",
        "torch==2.10.0+cpu",
        "torchvision==0.25.0",
        "triton-ascend==3.2.1",
    ]
    assert pins(packages, torch_only=True) == ["torch==2.10.0+cpu", "torchvision==0.25.0"]


def test_lists_in_a_pyproject() -> None:
    requires = (
        '[build-system]\nrequires = [\n    # "cmake" comes from elsewhere\n    "a[b]>=1",\n    '
        "'c; python_version < \"3.12\"',\n]\n"
    )
    text = requires + '[project]\ndependencies = ["d"]\n'
    assert strings_of("requires", text) == ["a[b]>=1", 'c; python_version < "3.12"']
    assert strings_of("dependencies", text) == ["d"]
    assert strings_of("nothing", text) == []


def test_the_projects_dependencies_are_read_as_a_parser_reads_them() -> None:
    tomllib = pytest.importorskip("tomllib")
    text = (ROOT / "pyproject.toml").read_text()
    wanted = tomllib.loads(text)["project"]["dependencies"]
    assert strings_of("dependencies", text) == wanted
    assert all(
        re.fullmatch(r"[a-z0-9-]+([<>=!]=?[\d.]+,?)*", requirement) for requirement in wanted
    ), "extras and markers are not read"


def test_missing_requirements() -> None:
    packages = {"ray": "2.39.0", "rich": "14", "hydra-core": "1.3.2"}
    wanted = missing(packages, ["torch", "ray>=2.40", "rich", "hydra-core>=1.3,<1.4", "psutil"])
    assert wanted == {"ray>=2.40": "ray 2.39.0 is not >=2.40", "psutil": "psutil is missing"}


def _planner(machine: Machine, root: Path, engines: bool = False) -> Planner:
    (root / "pyproject.toml").write_text('dependencies = ["numpy", "torch", "transformers"]\n')
    return Planner(
        machine=machine,
        row=TABLE["0.21.0"],
        root=root,
        python="python",
        scratch="scratch",
        engines=engines,
    )


def _blocking(planner: Planner, environ: dict[str, str]) -> list[str]:
    seen = findings(TABLE, planner.machine, planner.row)
    return [finding.what for finding in blocking_errors(seen, planner.steps(), planner, environ)]


def test_a_finished_machine_has_no_steps(tmp_path: Path) -> None:
    assert _planner(dataclasses.replace(FITS, project=str(tmp_path)), tmp_path).steps() == []
    elsewhere = _planner(dataclasses.replace(FITS, project=str(tmp_path / "old")), tmp_path).steps()
    assert [step.name for step in elsewhere] == ["verl-opd"]
    assert "is installed from" in elsewhere[0].reason


def test_transformers_comes_at_the_rows_pin_or_with_the_engine(tmp_path: Path) -> None:
    *_, step = _planner(_with(transformers=None), tmp_path).steps()
    assert step.command == (
        "python",
        "-m",
        "pip",
        "install",
        "-c",
        "scratch/constraints.txt",
        "transformers==5.5.4",
    )
    built = _planner(_with(transformers=None, vllm=None), tmp_path)
    assert [step.name for step in built.steps() if "transformers==5.5.4" in step.command] == [
        "pin torch"
    ]
    (tmp_path / ".git").mkdir()
    assert _blocking(built, {}) == []


def test_only_the_missing_engine_is_built(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    planner = _planner(_with(vllm_ascend=None), tmp_path)
    assert planner.builds() == ["vllm-ascend"]
    assert not any("third_party/vllm" in step.command for step in planner.steps())
    assert _blocking(planner, {"SOC_VERSION": "ascend910b1"}) == []
    assert _blocking(planner, {}) == ["SOC_VERSION"]


def test_engines_cannot_be_built_without_cann_or_a_clone(tmp_path: Path) -> None:
    planner = _planner(dataclasses.replace(_with(vllm=None, vllm_ascend=None), cann=None), tmp_path)
    assert _blocking(planner, {"SOC_VERSION": "ascend910b1"}) == ["cann", "git"]


def test_errors_that_no_step_repairs_are_blocking(tmp_path: Path) -> None:
    machine = _with(torch="2.11.0", triton="3.5.0", transformers="4.57.4", vllm_ascend="0.23.0")
    assert _blocking(_planner(machine, tmp_path), {}) == ["torch", "vllm-ascend", "transformers"]


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        npu_plan, "detect", lambda environ, root=None: dataclasses.replace(FITS, project=str(ROOT))
    )
    assert npu_plan.main(["check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "fits"
    assert npu_plan.main(["check", "--row", "0.23.0"]) == 1
    assert (
        "ERROR  vllm           0.21.0+empty, but vllm 0.23.0 needs 0.23.0"
        in capsys.readouterr().out
    )
    assert npu_plan.main(["plan", "--python", "python"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["row"], plan["because"], plan["blocking"]) == (
        "0.21.0",
        "vllm 0.21.0+empty is installed",
        [],
    )
    pin, install = plan["steps"]
    assert (pin["name"], install["command"][:4]) == ("pin all", ["python", "-m", "pip", "install"])
    assert "hydra-core is missing" in install["reason"]
    assert npu_plan.main(["pins", "--torch-only", "--out", str(tmp_path / "pins")]) == 0
    assert (tmp_path / "pins").read_text() == "torch==2.10.0+cpu\ntorch-npu==2.10.0\n"
    assert (
        npu_plan.main(
            [
                "pins",
                "--torch-only",
                "--also",
                "transformers==5.5.4",
                "--out",
                str(tmp_path / "pins"),
            ]
        )
        == 0
    )
    assert (tmp_path / "pins").read_text().endswith("torch-npu==2.10.0\ntransformers==5.5.4\n")


def test_it_runs_by_path_without_any_package(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        str(ROOT / "scripts" / "npu_plan.py"),
        "check",
        "--root",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert (
        "does not fit: torch, torch-npu, vllm, vllm-ascend, triton-ascend, transformers"
        in done.stdout
    )
