"""scripts/install.sh with a scripted interpreter: how it calls pip, and when it does nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Plays a virtual environment's python: notes its arguments, and fails where the variables below say
# so.
FAKE_PYTHON = """\
#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    -V) echo Python 3.11.0 ;;
    *check_install.py*--quick*) exit "${QUICK_CHECK:-0}" ;;
    *"pip install"*--extra-index-url*) ;;
    *"pip install"*-e*) [[ -z ${PIP_ERROR:-} ]] || { echo "$PIP_ERROR"; exit 1; } ;;
    *"import torchvision"*) exit 1 ;;
    *"import torchaudio"*) exit 0 ;;
    *"pip show"*torchcodec*) exit 1 ;;
    *"sys.version_info"*) exit "${UNSUPPORTED:-0}" ;;
esac
"""


class Installer:
    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        self._calls = folder / "calls"
        (self.venv / "bin").mkdir(parents=True)
        for name in ("python", "pip"):
            (self.venv / "bin" / name).write_text(FAKE_PYTHON)
            (self.venv / "bin" / name).chmod(0o755)

    def run(
        self, extras: str = "cpu,test", **env: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """The finished process, and the calls of the interpreter in it."""
        self._calls.write_text("")
        command = [
            str(ROOT / "scripts" / "install.sh"),
            "--venv",
            str(self.venv),
            "--extras",
            extras,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **env, "CALLS": str(self._calls)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done, self._calls.read_text().splitlines()


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(tmp_path)


def _installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "pip install" in call and "-e" in call.split()]


def test_second_run_only_checks(installer: Installer) -> None:
    done, calls = installer.run()
    assert done.returncode == 0, done.stderr
    assert len(_installs(calls)) == 1
    assert "download.pytorch.org" not in " ".join(calls)
    done, calls = installer.run()
    assert done.returncode == 0
    assert _installs(calls) == []
    assert any("check_install.py" in call and "--quick" in call for call in calls)


def test_a_broken_or_different_install_is_made_again(installer: Installer) -> None:
    installer.run()
    done, calls = installer.run(QUICK_CHECK="1")
    assert "no longer works" in done.stdout
    assert len(_installs(calls)) == 1
    _, calls = installer.run(extras="cpu")
    assert _installs(calls)[0].endswith("-e .[cpu]")


def test_only_builds_that_do_not_import_are_removed(installer: Installer) -> None:
    _, calls = installer.run()
    assert [call.split()[-1] for call in calls if "uninstall" in call] == ["torchvision"]


def test_an_index_without_cpu_torch_falls_back_to_pytorchs_own(installer: Installer) -> None:
    done, calls = installer.run(
        PIP_ERROR="ERROR: No matching distribution found for torch==2.13.0+cpu"
    )
    assert done.returncode == 0, done.stderr
    first, second = _installs(calls)
    assert "--extra-index-url" not in first
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in second


@pytest.mark.parametrize(
    ("extras", "error"),
    [
        ("cpu,test", "ERROR: No space left on device"),
        ("cuda", "ERROR: No matching distribution found for torch==2.13.0+cpu"),
    ],
)
def test_other_failures_are_shown_and_leave_no_stamp(
    installer: Installer, extras: str, error: str
) -> None:
    done, calls = installer.run(extras=extras, PIP_ERROR=error)
    assert done.returncode == 1
    assert error in done.stderr
    assert "could not install" in done.stderr
    assert len(_installs(calls)) == 1
    assert len(_installs(installer.run(extras=extras)[1])) == 1


def test_an_unsupported_python_is_named(installer: Installer, tmp_path: Path) -> None:
    done, _ = installer.run(UNSUPPORTED="1")
    assert done.returncode == 1
    assert str(installer.venv) in done.stderr
    assert "3.10 to 3.12" in done.stderr
    command = [str(ROOT / "scripts" / "install.sh"), "--venv", str(tmp_path / "fresh")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "tried: no-such-python" in done.stderr
    assert not (tmp_path / "fresh").exists()
