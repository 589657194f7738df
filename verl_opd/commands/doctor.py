"""`verl-opd doctor`: looks at everything a long run needs, before it needs it, and says what to do
about what is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_opd.ascend import versions as stack
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.devices import available_cores, resolve_device
from verl_opd.errors import ConfigError
from verl_opd.report.console import Console
from verl_opd.report.rundir import versions

_GB = 1e9


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is as a run needs it (None: worth knowing, stops nothing),
    what was seen, and what to do.
    """

    what: str
    good: bool | None
    seen: str
    remedy: str = ""


def diagnose(cfg: Config) -> list[Finding]:
    """All checks, each on its own: one that fails does not hide the others. Starts nothing and
    writes nothing but one empty file in the run directory's parent, which it removes.
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
        try:
            findings.extend(check(cfg))
        except ConfigError as error:
            findings.append(
                Finding(check.__name__.strip("_"), False, str(error), "correct the named key")
            )
        except Exception as error:  # a broken package breaks the checks that need it, and no other
            findings.append(
                Finding(
                    check.__name__.strip("_"),
                    False,
                    f"{type(error).__name__}: {error}",
                    "see the packages above",
                )
            )
    return findings


def _packages(cfg: Config) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        "python",
        (3, 10) <= sys.version_info[:2] <= (3, 12),
        python,
        "use Python 3.10, 3.11 or 3.12",
    )
    found = versions()
    wanted = [
        ("torch", "cpu"),
        ("transformers", "cpu"),
        ("ray", "cpu"),
        ("vllm", "cuda' or 'verl-opd[cpu]"),
    ]
    wanted += [(name, name) for name in cfg.trainer.logger if name in ("tensorboard", "wandb")]
    npu = cfg.trainer.device == "npu" or (
        cfg.trainer.device == "auto" and importlib.util.find_spec("torch_npu") is not None
    )
    for name, extra in wanted:
        try:
            importlib.import_module(name)
        except (
            Exception
        ) as error:  # whatever keeps a package from importing is what the user has to see
            remedy = (
                "./install_npu.sh"
                if npu and name != "wandb"
                else f"pip install 'verl-opd[{extra}]' in a fresh virtual environment"
            )
            yield Finding(name, False, f"{type(error).__name__}: {error}", remedy)
        else:
            version = (
                found.get(name)
                or found.get(f"{name}-cpu")
                or getattr(sys.modules[name], "__version__", "unknown")
            )
            yield Finding(name, True, str(version))


def _device(cfg: Config) -> Iterator[Finding]:
    device = resolve_device(cfg.trainer.device)
    teachers = len(teacher_models(cfg)) * cfg.teacher.replicas
    wanted = cfg.trainer.n_student_workers + teachers
    whom = f"{cfg.trainer.n_student_workers} student worker(s) and {teachers} teacher server(s)"
    if device.name == "cpu":
        cores = len(available_cores())
        enough = cores >= wanted
        yield Finding(
            "cores",
            True if enough else None,
            f"{cores} for {whom}",
            "" if enough else "they will share cores: runs get slow",
        )
        return
    import torch

    count = getattr(torch, device.name).device_count()
    remedy = (
        "lower trainer.n_student_workers, or join a cluster through RAY_ADDRESS; "
        f"{device.visible_env}={os.environ.get(device.visible_env or '', '')!r}"
    )
    yield Finding(
        "devices",
        count >= wanted or bool(os.environ.get("RAY_ADDRESS")),
        f"{count} {device.name} for {whom}",
        remedy,
    )


def _stack(cfg: Config) -> Iterator[Finding]:
    """On NPUs: what does not fit together, or one line that says that all does."""
    if resolve_device(cfg.trainer.device).name != "npu":
        return
    table, machine = stack.read_table(), stack.detect(os.environ)
    row, why = stack.pick_row(table, machine)
    odd = [finding for finding in stack.findings(table, machine, row) if finding.level != "ok"]
    for finding in odd:
        yield Finding(
            "NPU stack",
            False if finding.level == "error" else None,
            f"{finding.what}: {finding.seen}",
            finding.remedy,
        )
    if row and not odd:
        yield Finding(
            "NPU stack", True, f"as third_party/versions.json has it for vllm {row.vllm} ({why})"
        )


def _host(cfg: Config) -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    yield Finding(
        "memory",
        True if free > 8 * _GB else None,
        f"{free / _GB:.1f} GB free",
        "" if free > 8 * _GB else "the quickstart takes about 10 GB",
    )
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    remedy = "containers: --shm-size=8g; without room drafts travel through the run directory"
    yield Finding(
        "shared memory",
        True if room > _GB else None,
        f"{room / _GB:.2f} GB free in /dev/shm",
        "" if room > _GB else remedy,
    )


def _ports(cfg: Config) -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            yield Finding(
                "loopback", True, f"the kernel gives ports, such as {probe.getsockname()[1]}"
            )
    except OSError as error:
        yield Finding(
            "loopback",
            False,
            str(error),
            "127.0.0.1 must be up, with free ports: engines listen there",
        )


def _disk(cfg: Config) -> Iterator[Finding]:
    root = Path(cfg.trainer.run_dir).expanduser().resolve()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    probe = parent / f".verl-opd-doctor-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        yield Finding(
            "run directory",
            False,
            f"{parent} cannot be written ({error.strerror})",
            "choose another trainer.run_dir",
        )
        return
    free = shutil.disk_usage(parent).free
    yield Finding(
        "run directory",
        free > _GB,
        f"{root}: {free / _GB:.1f} GB free",
        "free some space: every checkpoint holds the draft seven times over",
    )


def _configuration(cfg: Config) -> Iterator[Finding]:
    from verl_opd.config.validate import validate
    from verl_opd.controller.job import prepare

    validate(cfg)
    job = prepare(cfg)
    yield Finding("target", True, cfg.target.path)
    yield Finding("draft", True, cfg.draft.path or f"{cfg.draft.family} from random weights")
    yield Finding(
        "prompts",
        True,
        f"{len(job.train)} to train on ({job.train_report}), "
        f"{sum(map(len, job.benchmarks.values()))} held out",
    )
    if job.conversations is not None:
        yield Finding("conversations", True, str(job.conversations()[1]))
    size = cfg.data.train_batch_size
    yield Finding(
        "batch",
        len(job.train) >= size,
        f"data.train_batch_size={size} of {len(job.train)} prompts",
        "lower it, or add prompts",
    )


def report(cfg: Config) -> bool:
    """Print what was found; whether a run can start."""
    console, findings = Console(), diagnose(cfg)
    words = {True: "ok", None: "note", False: "MISSING"}
    for finding in findings:
        console.print(f"{words[finding.good]:<8}{finding.what:<15}{finding.seen}")
        if finding.remedy and finding.good is not True:
            console.print(f"{'':<23}-> {finding.remedy}")
    bad = list(dict.fromkeys(finding.what for finding in findings if finding.good is False))
    console.print(f"cannot run: {', '.join(bad)}" if bad else "ready to run")
    return not bad
