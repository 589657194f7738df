"""install_npu.sh on machines made of fake packages: how it calls pip and git, when it stops, and
when it does nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "sed", "tr")
SCRIPTS = [
    ROOT / "install_npu.sh",
    *sorted((ROOT / "scripts").glob("*.sh")),
    *sorted((ROOT / "examples").rglob("*.sh")),
]

# Sees only the packages below $SITE; calls of pip are noted and played by PIP.
PYTHON = """\
#!/usr/bin/env bash
if [[ "$1 $2" == "-m pip" ]]; then shift 2; exec "$REAL_PYTHON" -S "$FAKES/pip.py" "$@"; fi
PYTHONPATH=$SITE exec "$REAL_PYTHON" -S "$@"
"""

PIP = """\
import json, os, pathlib, re, shutil, sys
site, fakes = pathlib.Path(os.environ["SITE"]), pathlib.Path(os.environ["FAKES"])
arguments = sys.argv[1:]
def put(name, version, origin=None):
    for old in site.glob(name.replace("-", "_") + "-*.dist-info"):
        shutil.rmtree(old)
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    head = "Metadata-Version: 2.1"
    (folder / "METADATA").write_text(f"{head}\\nName: {name}\\nVersion: {version}\\n")
    if origin:
        url = {"url": f"file://{origin}", "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(url))
for option in ("-c", "-r"):
    if option in arguments:
        at = arguments.index(option) + 1
        shutil.copy(arguments[at], fakes)
        arguments[at] = os.path.basename(arguments[at])
names = ("VLLM_TARGET_DEVICE", "COMPILE_CUSTOM_KERNELS", "SETUPTOOLS_SCM_PRETEND_VERSION")
given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
line = " ".join([*given, "pip", *arguments])
with open(os.environ["CALLS"], "a") as file:
    file.write(line + "\\n")
(fakes / "seen.json").write_text(json.dumps({"cwd": os.getcwd(), "env": dict(os.environ)}))
if os.environ.get("FAIL", "\\0") in line:
    sys.exit("ERROR: no network")
if "torch" in os.environ.get("REPLACES", "") and "-e" not in arguments:
    put("torch", "2.11.0")
if arguments[0] == "uninstall":
    for name in arguments[2:]:
        for old in site.glob(name.replace("-", "_") + "-*.dist-info"):
            shutil.rmtree(old)
elif arguments[-2:] == ["-e", "."]:
    put("verl-opd", "0.1.0", os.getcwd())
elif arguments[-1] in ("third_party/vllm", "third_party/vllm-ascend"):
    name = os.path.basename(arguments[-1])
    put(name, os.environ["SETUPTOOLS_SCM_PRETEND_VERSION"] + ("+empty" if name == "vllm" else ""))
    put("triton", "3.5.0")
    put("transformers", "5.5.4")
else:
    for word in arguments[1:]:
        if re.match(r"[a-z]", word) and not word.endswith(".txt") and "://" not in word:
            number = re.search(r"[0-9][0-9a-z.]*", word.split("=", 1)[-1])
            put(re.split("[<>=]", word)[0], number[0] if number else "9.0")
"""

GIT = """\
#!/usr/bin/env bash
echo "git $*" >>"$CALLS"
if [[ $* == "submodule update --init "* ]]; then
    for folder in "${@:4}"; do
        mkdir -p "$folder"
        printf '%s\\n' '[build-system]' 'requires = [' '    "setuptools>=77",' \\
            '    "torch==2.11.0",' '    "triton-ascend==3.2.1",' ']' >"$folder/pyproject.toml"
    done
fi
"""

SET_ENV = """\
[[ $# == 0 ]] || exit 3
export ASCEND_PROBE="${ASCEND_PROBE_SUFFIX}loaded"
check() { echo hijacked; }
echo noise
false
"""

VENDOR = {
    "vllm": "0.21.0+empty",
    "vllm_ascend": "0.21.0rc1",
    "torch": "2.10.0+cpu",
    "torch_npu": "2.10.0",
    "torchvision": "0.25.0",
    "triton_ascend": "3.2.1",
    "transformers": "5.5.4",
    "numpy": "1.26.4",
    "Jinja2": "3.1.6",
    "psutil": "7.0.0",
    "PyYAML": "6.0.2",
    "ray": "2.48.0",
    "safetensors": "0.5.3",
}
SMALL = {"hydra_core": "1.3.2", "omegaconf": "2.3.0", "rich": "14.0.0", "tensorboard": "2.20.0"}
V023 = {
    **VENDOR,
    **SMALL,
    "vllm": "0.23.0+empty",
    "vllm_ascend": "0.23.0.post1",
    "torch_npu": "2.10.0.post4",
    "triton_ascend": "3.2.2",
}
TORCH_ONLY = {"torch": "2.10.0+cpu", "torch_npu": "2.10.0", "numpy": "1.26.4", **SMALL}
PROJECT = "pip install --no-deps -e ."
DEPENDENCIES = (
    "pip install -c constraints.txt hydra-core>=1.3,<1.4 omegaconf>=2.3,<2.4 rich tensorboard"
)
TRITON = (
    "pip install --no-deps --index-url https://mirrors.huaweicloud.com/ascend/repos/pypi "
    "triton-ascend==3.2.1"
)
REMOVE = "pip uninstall --yes triton triton-ascend"


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """A checkout, a python with the given packages, npu-smi, git and CANN, each of which a test can
    take away.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkout, self.site = folder, folder / "checkout", folder / "site"
        self.bin, self.cann = folder / "bin", folder / "Ascend" / "ascend-toolkit" / "latest"
        self.site.mkdir()
        for name in (
            "install_npu.sh",
            "pyproject.toml",
            "third_party/versions.json",
            "verl_opd/__init__.py",
            "verl_opd/errors.py",
            "verl_opd/ascend/versions.py",
            "scripts/npu_plan.py",
        ):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / ".git").mkdir()
        _script(self.bin / "python3", PYTHON)
        _script(self.bin / "git", GIT)
        _script(self.bin / "npu-smi", "#!/usr/bin/env bash\n")
        for tool in (*TOOLS, "mkdir"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        (folder / "pip.py").write_text(PIP)
        for script in (
            self.cann.parent / "set_env.sh",
            self.cann.parents[1] / "nnal" / "atb" / "set_env.sh",
        ):
            _script(script, SET_ENV)
        self.set_cann("9.0.0")

    def set_cann(self, version: str) -> None:
        _script(
            self.cann / "aarch64-linux" / "ascend_toolkit_install.info",
            f"package_name=Ascend-cann-toolkit\nversion={version}\n",
        )

    def install(self, packages: dict[str, str]) -> Machine:
        for name, version in packages.items():
            folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        return self

    def packages(self) -> list[str]:
        return sorted(path.name.removesuffix(".dist-info") for path in self.site.iterdir())

    def run(self, *options: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """The finished process, and what it called of pip and git."""
        calls = self.folder / "calls"
        calls.write_text("")
        paths = {
            "SITE": self.site,
            "FAKES": self.folder,
            "CALLS": calls,
            "REAL_PYTHON": sys.executable,
            "PATH": self.bin,
        }
        variables = {
            **{key: str(value) for key, value in paths.items()},
            "ASCEND_TOOLKIT_HOME": str(self.cann),
            "TMPDIR": str(self.folder),
            **env,
        }
        command = [str(self.checkout / "install_npu.sh"), *options]
        done = subprocess.run(
            command,
            env=variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done, calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_vendor_container_gets_the_project_and_what_is_small_and_missing(
    machine: Machine,
) -> None:
    done, calls = machine.install(VENDOR).run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls == [PROJECT, DEPENDENCIES]
    pinned = (
        "numpy==1.26.4 torch==2.10.0+cpu torch-npu==2.10.0 torchvision==0.25.0 transformers==5.5.4 "
        "triton-ascend==3.2.1"
    )
    assert (machine.folder / "constraints.txt").read_text().split() == [
        *pinned.split(),
        "vllm==0.21.0+empty",
        "vllm-ascend==0.21.0rc1",
    ]
    assert done.stdout.rstrip().splitlines()[-2] == "fits"
    assert not list(machine.folder.glob("tmp.*")), "scratch files are gone"

    before = machine.packages()
    done, calls = machine.run()
    assert (done.returncode, calls, machine.packages()) == (0, [], before)
    assert "nothing is missing" in done.stdout


def test_the_second_supported_container(machine: Machine) -> None:
    machine.set_cann("9.1.0")
    done, calls = machine.install(V023).run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls == [PROJECT]
    assert "Ascend stack, vllm 0.23.0 (vllm 0.23.0+empty is installed)" in done.stdout


def test_without_torch_it_stops_and_prints_what_to_do(machine: Machine) -> None:
    done, calls = machine.install(SMALL).run(SOC_VERSION="ascend910b1")
    assert done.returncode == 1
    assert calls == []
    assert "torch: not installed" in done.stderr
    assert "pip install torch==2.10.0 torch-npu==2.10.0" in done.stderr
    assert "quay.io/ascend/vllm-ascend:v0.21.0rc1" in done.stderr
    assert "nothing was changed" in done.stderr


def _engine_calls(fetch: list[str], vllm: str, ascend: str) -> list[str]:
    indexes = (
        "--extra-index-url https://download.pytorch.org/whl/cpu --extra-index-url "
        "https://mirrors.huaweicloud.com/ascend/repos/pypi"
    )
    install = f"pip install --no-build-isolation -c torch.txt {indexes} -e third_party"
    return [
        "git submodule update --init third_party/vllm third_party/vllm-ascend",
        *fetch,
        "git -C third_party/vllm-ascend submodule update --init --recursive",
        "pip install -r build.txt -c torch.txt",
        f"VLLM_TARGET_DEVICE=empty SETUPTOOLS_SCM_PRETEND_VERSION={vllm} {install}/vllm",
        "pip uninstall --yes triton",
        f"COMPILE_CUSTOM_KERNELS=1 SETUPTOOLS_SCM_PRETEND_VERSION={ascend} {install}/vllm-ascend",
        REMOVE,
    ]


def test_missing_engines_are_built_in_order(machine: Machine) -> None:
    done, calls = machine.install(TORCH_ONLY).run()
    assert done.returncode == 1
    assert calls == []
    assert "SOC_VERSION: not set" in done.stderr
    assert "ascend910b1 (Atlas A2), ascend910_9391 (Atlas A3)" in done.stderr

    done, calls = machine.run(SOC_VERSION="ascend910_9391")
    assert done.returncode == 0, done.stdout + done.stderr
    small = "pip install -c constraints.txt jinja2 psutil pyyaml ray>=2.40 safetensors"
    assert calls == [*_engine_calls([], "0.21.0", "0.21.0rc1"), TRITON, PROJECT, small]
    assert (machine.folder / "torch.txt").read_text().split() == [
        "torch==2.10.0+cpu",
        "torch-npu==2.10.0",
        "transformers==5.5.4",
    ]
    assert (machine.folder / "build.txt").read_text().split() == ["setuptools>=77"]
    assert not any(name.startswith("triton-") for name in machine.packages())
    assert machine.run()[1] == []


def test_engines_of_another_row_are_checked_out_by_tag(machine: Machine) -> None:
    machine.set_cann("9.1.0")
    machine.install({**TORCH_ONLY, "torch_npu": "2.10.0.post4"})
    done, calls = machine.run("--row", "0.23.0", SOC_VERSION="ascend910b1")
    assert done.returncode == 0, done.stdout + done.stderr
    fetch = [
        f"git -C third_party/{name} {what}"
        for name in ("vllm", "vllm-ascend")
        for what in ("fetch --depth 1 origin tag v0.23.0", "checkout --detach v0.23.0")
    ]
    assert calls[:8] == _engine_calls(fetch, "0.23.0", "0.23.0")[:8]
    assert "vllm-0.23.0+empty" in machine.packages()


def test_installed_engines_are_built_on_request(machine: Machine) -> None:
    done, calls = machine.install(
        {**VENDOR, **SMALL, "vllm": "0.18.0+empty", "vllm_ascend": "0.18.0"}
    ).run()
    assert (done.returncode, calls) == (1, [])
    assert "vllm 0.18.0+empty has no row" in done.stderr
    assert "./install_npu.sh --engines" in done.stderr
    done, calls = machine.run("--engines", SOC_VERSION="ascend910b1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls == [*_engine_calls([], "0.21.0", "0.21.0rc1"), TRITON, PROJECT]


def test_both_tritons_are_removed_and_the_right_one_comes_back(machine: Machine) -> None:
    done, calls = machine.install({**VENDOR, **SMALL, "triton": "3.5.0"}).run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls == [REMOVE, TRITON, PROJECT]


def test_a_missing_triton_ascend_comes_from_its_own_index(machine: Machine) -> None:
    packages = {
        name: version for name, version in {**VENDOR, **SMALL}.items() if name != "triton_ascend"
    }
    done, calls = machine.install(packages).run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls == [TRITON, PROJECT]


def test_another_torch_is_an_error(machine: Machine) -> None:
    done, calls = machine.install({**VENDOR, "torch": "2.11.0"}).run()
    assert (done.returncode, calls) == (1, [])
    assert "torch: 2.11.0, but vllm 0.21.0 needs 2.10.0" in done.stderr


def test_a_cuda_machine_is_sent_elsewhere(machine: Machine) -> None:
    (machine.bin / "npu-smi").rename(machine.bin / "nvidia-smi")
    for options in ((), ("--dry-run",), ("--check",)):
        done, calls = machine.install({} if machine.packages() else VENDOR).run(*options)
        assert (done.returncode, calls) == (1, [])
        assert "scripts/install.sh --extras cuda,test" in done.stdout + done.stderr


def test_a_pip_that_replaces_torch_is_an_error(machine: Machine) -> None:
    done, calls = machine.install(VENDOR).run(REPLACES="torch")
    assert done.returncode == 1
    assert calls == [PROJECT, DEPENDENCIES]
    assert (
        "the step 'dependencies' changed torch from torch==2.10.0+cpu torch-npu==2.10.0 to "
        "torch==2.11.0" in done.stderr
    )
    assert "pip install --no-deps torch==2.10.0+cpu torch-npu==2.10.0" in done.stderr


def test_a_failed_step_stops_and_the_next_run_begins_with_it(machine: Machine) -> None:
    done, _ = machine.install(VENDOR).run(FAIL="hydra-core")
    assert done.returncode == 1
    assert "ERROR: no network" in done.stderr
    assert "the step 'dependencies' failed" in done.stderr
    assert machine.run()[1] == [DEPENDENCIES]


@pytest.mark.parametrize(
    "packages",
    [VENDOR, TORCH_ONLY, SMALL, {**VENDOR, "triton": "3.5.0"}],
    ids=["vendor", "engines", "bare", "triton"],
)
def test_a_dry_run_shows_the_steps_and_changes_nothing(
    machine: Machine, packages: dict[str, str]
) -> None:
    before = sorted(machine.install(packages).folder.rglob("*"))
    done, calls = machine.run("--dry-run", SOC_VERSION="ascend910b1")
    assert calls == []
    assert [path for path in sorted(machine.folder.rglob("*")) if path.name != "calls"] == before
    assert done.returncode == (1 if packages is SMALL else 0), done.stderr
    assert "install_npu: verl-opd: verl-opd is not installed from this folder" in done.stdout
    assert "-m pip install --no-deps -e ." in done.stdout
    assert ("env VLLM_TARGET_DEVICE=empty" in done.stdout) == ("vllm" not in packages)


def test_the_check_alone(machine: Machine) -> None:
    machine.install(VENDOR)
    done, calls = machine.run("--check")
    assert (done.returncode, calls) == (0, [])
    done, calls = machine.run("--check", "--row", "0.23.0")
    assert (done.returncode, calls) == (1, [])
    assert "does not fit: cann, vllm, vllm-ascend" in done.stdout


def test_cann_is_loaded_and_pip_runs_in_the_checkout(machine: Machine) -> None:
    (machine.folder / "vllm").mkdir()  # would be imported as a namespace package from here
    machine.install(VENDOR)
    done, _ = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    seen = (machine.folder / "seen.json").read_text()
    assert '"ASCEND_PROBE": "loaded"' in seen
    assert f'"cwd": "{machine.checkout}"' in seen
    assert (
        f"source {machine.cann.parent}/set_env.sh; source "
        f"{machine.cann.parents[1]}/nnal/atb/set_env.sh;" in done.stdout
    )
    assert "hijacked" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--fast"], "unknown option --fast"), (["--row", "0.22.0"], "invalid choice: '0.22.0'")],
)
def test_wrong_options_are_named(machine: Machine, options: list[str], words: str) -> None:
    done, calls = machine.install(VENDOR).run(*options)
    assert done.returncode != 0
    assert calls == []
    assert words in done.stderr


def test_the_interpreter_can_be_chosen(machine: Machine) -> None:
    machine.install(VENDOR)
    (machine.bin / "python3").rename(machine.bin / "python-of-choice")
    done, _ = machine.run()
    assert done.returncode == 1
    assert "PYTHON=/path/to/python" in done.stderr
    for choice in ("python-of-choice", "bin/python-of-choice"):
        done, _ = machine.run(PYTHON=choice)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "shellcheck is missing: make install"
    done = subprocess.run(
        [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
