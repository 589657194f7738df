"""`verl-opd doctor`: checks everything that a long run needs before the run starts, and prints a
remedy for everything that is missing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from verl_opd.ascend import versions as stack
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.devices import available_cores, resolve_device
from verl_opd.errors import ConfigError, Finding
from verl_opd.report.console import Console
from verl_opd.report.rundir import versions

_GB = 1e9
_WORDS = {"ok": "ok", "note": "note", "error": "MISSING"}


def print_diagnosis(cfg: Config) -> bool:
    """Print all findings; returns whether a run can start."""
    console, findings = Console(), diagnose(cfg)
    for finding in findings:
        console.print(f"{_WORDS[finding.level]:<8}{finding.what:<15}{finding.seen}")
        if finding.remedy and finding.level != "ok":
            console.print(f"{'':<23}-> {finding.remedy}")
    bad = list(dict.fromkeys(finding.what for finding in findings if finding.level == "error"))
    console.print(f"cannot run: {', '.join(bad)}" if bad else "ready to run")
    return not bad


def diagnose(cfg: Config) -> list[Finding]:
    """The findings of all checks; a check that fails does not hide the others. Starts nothing, and
    writes only an empty file beside the run directory, which it removes.
    """
    checks: list[Callable[[Config], Iterator[Finding]]] = [
        _packages,
        _device,
        _stack,
        _host,
        _ports,
        _disk,
        _configuration,
    ]
    findings: list[Finding] = []
    for check in checks:
        name = check.__name__.strip("_")
        try:
            findings.extend(check(cfg))
        except ConfigError as error:
            findings.append(Finding(name, "error", str(error), "correct the named key"))
        except Exception as error:  # a broken package fails only the checks that need it
            seen = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "error", seen, "see the packages above"))
    return findings


def _level(good: bool, otherwise: str = "error") -> str:
    return "ok" if good else otherwise


def _packages(cfg: Config) -> Iterator[Finding]:
    python, supported = sys.version_info[:3], (3, 10) <= sys.version_info[:2] <= (3, 12)
    text = ".".join(map(str, python))
    yield Finding("python", _level(supported), text, "use Python 3.10, 3.11 or 3.12")
    # package -> extra of verl-opd that installs it
    wanted = {
        "torch": "cpu",
        "transformers": "cpu",
        "ray": "cpu",
        "vllm": "cuda' or 'verl-opd[cpu]",
        **{name: name for name in cfg.trainer.logger if name in ("tensorboard", "wandb")},
    }
    found, script = versions(), _installer(cfg)
    for name, extra in wanted.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            pip = f"pip install 'verl-opd[{extra}]' in a fresh virtual environment"
            remedy = script if script and name != "wandb" else pip
            yield Finding(name, "error", f"{type(error).__name__}: {error}", remedy)
        else:
            version = found.get(name) or found.get(f"{name}-cpu")
            unknown = getattr(sys.modules[name], "__version__", "unknown")
            yield Finding(name, "ok", str(version or unknown))


def _installer(cfg: Config) -> str | None:
    """The script that installs packages for this kind of device; None where pip does."""
    try:
        device = resolve_device(cfg.trainer.device)
    except Exception:  # `auto` without a working torch: a finding of its own
        return None
    return "./install_npu.sh" if device.stack == "ascend" else None


def _device(cfg: Config) -> Iterator[Finding]:
    device = resolve_device(cfg.trainer.device)
    teachers = len(teacher_models(cfg)) * cfg.teacher.replicas
    wanted = cfg.trainer.n_student_workers + teachers
    users = f"{cfg.trainer.n_student_workers} student worker(s) and {teachers} teacher server(s)"
    if device.on_host:
        cores = len(available_cores())
        remedy = "some will share cores, which slows the run down"
        yield Finding("cores", _level(cores >= wanted, "note"), f"{cores} for {users}", remedy)
        return
    import torch

    count = getattr(torch, device.name).device_count()
    remedy = (
        "lower trainer.n_student_workers, or join a cluster through RAY_ADDRESS; "
        f"{device.visible_env}={os.environ.get(device.visible_env or '', '')!r}"
    )
    enough = count >= wanted or bool(os.environ.get("RAY_ADDRESS"))
    yield Finding("devices", _level(enough), f"{count} {device.name} for {users}", remedy)


def _stack(cfg: Config) -> Iterator[Finding]:
    """On NPUs: which versions do not fit together, or one line that all do."""
    if resolve_device(cfg.trainer.device).stack != "ascend":
        return
    table, machine = stack.read_table(), stack.detect(os.environ)
    row, why = stack.pick_row(table, machine)
    odd = [finding for finding in stack.findings(table, machine, row) if finding.level != "ok"]
    for finding in odd:
        yield replace(finding, what="NPU stack", seen=f"{finding.what}: {finding.seen}")
    if row and not odd:
        fits = f"matches third_party/versions.json for vllm {row.vllm} ({why})"
        yield Finding("NPU stack", "ok", fits)


def _host(cfg: Config) -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    level, remedy = _level(free > 8 * _GB, "note"), "the quickstart takes about 10 GB"
    yield Finding("memory", level, f"{free / _GB:.1f} GB free", remedy)
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    level, seen = _level(room > _GB, "note"), f"{room / _GB:.2f} GB free in /dev/shm"
    remedy = "containers: --shm-size=8g; without room drafts travel through the run directory"
    yield Finding("shared memory", level, seen, remedy)


def _ports(cfg: Config) -> Iterator[Finding]:
    remedy = "127.0.0.1 must be up, with free ports: engines listen there"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            seen = f"free ports available, such as {probe.getsockname()[1]}"
    except OSError as error:
        yield Finding("loopback", "error", str(error), remedy)
    else:
        yield Finding("loopback", "ok", seen)


def _disk(cfg: Config) -> Iterator[Finding]:
    root = Path(cfg.trainer.run_dir).expanduser().resolve()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    probe = parent / f".verl-opd-doctor-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        seen = f"{parent} cannot be written ({error.strerror})"
        yield Finding("run directory", "error", seen, "choose another trainer.run_dir")
        return
    free = shutil.disk_usage(parent).free
    seen = f"{root}: {free / _GB:.1f} GB free"
    remedy = "free some space: a checkpoint is seven times as large as the draft"
    yield Finding("run directory", _level(free > _GB), seen, remedy)


def _configuration(cfg: Config) -> Iterator[Finding]:
    from verl_opd.config.validate import validate
    from verl_opd.controller.job import prepare

    validate(cfg)
    job = prepare(cfg)
    yield Finding("target", "ok", cfg.target.path)
    yield Finding("draft", "ok", cfg.draft.path or f"{cfg.draft.family} from random weights")
    held_out = sum(map(len, job.benchmarks.values()))
    seen = f"{len(job.train)} to train on ({job.train_report}), {held_out} held out"
    yield Finding("prompts", "ok", seen)
    if job.conversations is not None:
        yield Finding("conversations", "ok", str(job.conversations()[1]))
    size = cfg.data.train_batch_size
    seen = f"data.train_batch_size={size} of {len(job.train)} prompts"
    yield Finding("batch", _level(len(job.train) >= size), seen, "lower it, or add prompts")
