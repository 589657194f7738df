"""The only door of the golden tests to the package: after a rename, change this file alone.

Everything goes in and comes out as plain data.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests import docs
from tests.golden import cases
from tests.golden.cases import Case, Event, Text
from verl_opd.cli import main
from verl_opd.compat import aliases
from verl_opd.compat.translate import translate
from verl_opd.config.recipes import recipe_names
from verl_opd.config.schema import Config
from verl_opd.controller import fleet as fleet_module
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.loop import Loop
from verl_opd.controller.position import Position
from verl_opd.controller.progress import Progress
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.stages import Blocks, OnPolicy, Supervised
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.drafts import get_family
from verl_opd.drafts.resolve import draft_config_of
from verl_opd.errors import ConfigError
from verl_opd.opd import trace as traces
from verl_opd.opd import wire
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.trace import RolloutSample, TeacherScores
from verl_opd.report.step_report import StepReporter
from verl_opd.report.timing import Stopwatch
from verl_opd.rollout.sync import SyncReport
from verl_opd.training.trainer import DraftTrainer

# Keys of the configuration that were renamed since the recording, old dotted prefix -> new one.
RENAMED: dict[str, str] = {
    "warmup": "sft",
    "trainer.warmup_steps": "sft.steps",
    "training": "compute",
}

_ROOT = Path(__file__).parents[2]
_CPU = "cpu"


def renamed(key: str) -> str:
    """Today's name of a key of the configuration; the longest prefix in RENAMED counts."""
    for old in sorted(RENAMED, key=len, reverse=True):
        if key == old or key.startswith(f"{old}."):
            return RENAMED[old] + key[len(old) :]
    return key


# -- models and configuration ---------------------------------------------------------------------


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """One thread and a process group of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def target_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        pad_token_id=0,
        initializer_range=0.25,
    )


def save_target(folder: Path) -> None:
    """A random float32 target."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(target_config()).save_pretrained(folder)


def configure(case: Case, target: Path) -> Config:
    cfg = Config()
    for key, value in {"target.path": str(target), **case.all_settings}.items():
        *sections, name = renamed(key).split(".")
        node: Any = cfg
        for section in sections:
            node = getattr(node, section)
        getattr(node, name)  # a key that does not exist is a mistake here
        setattr(node, name, value)
    return cfg


def save_small_draft(cfg: Config, proposable: Sequence[int], folder: Path) -> None:
    """A draft with a vocabulary of its own, which `cfg` starts from afterwards."""
    family = get_family(cfg.draft.family)
    config = draft_config_of(cfg, target_config())
    config["draft_vocab_size"] = len(proposable)
    draft = family.build(config, seed=3, init_std=cfg.draft.init_std)
    state, ids = draft.state_dict(), torch.tensor(proposable)
    state["d2t"] = ids - torch.arange(len(ids))
    state["t2d"][ids] = True
    family.save_pretrained(state, config, folder)
    cfg.draft.path = str(folder)


def trainer_of(cfg: Config, draft_config: dict[str, Any]) -> DraftTrainer:
    trainer = DraftTrainer(cfg, draft_config, 0, 1, _CPU)
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1e-5  # else other machines' rounding becomes whole steps
    return trainer


def weights_of(trainer: DraftTrainer) -> dict[str, Tensor]:
    """The trained weights by public name, sorted by it."""
    named = sorted(trainer.draft.named_parameters())
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().contiguous()
        for name, p in named
    }


# -- a run without engines ------------------------------------------------------------------------


@dataclass
class Record:
    """What a run leaves: per optimiser step, per logged step, and the weights at the end."""

    steps: list[dict[str, float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class LocalTrainers:
    """One trainer in this process in place of those behind Ray; notes every optimiser step."""

    draft_parameters = 1

    def __init__(self, trainer: DraftTrainer, record: Record) -> None:
        self._trainer, self._record = trainer, record
        self.score = trainer.score
        self.save = self.export = lambda directory: None

    def update(self, *args: Any) -> list[Any]:
        metrics = self._trainer.update(*args)
        values = reduce_metrics([metrics])
        names = {"loss": "actor/distillation/loss", "grad_norm": "actor/grad_norm"}
        step = {**names, "lr": "actor/lr", "skipped": "actor/skipped_steps"}
        self._record.steps.append({name: values[metric] for name, metric in step.items()})
        return [metrics]

    def snapshot(self, path: Path, version: int) -> Any:
        return self._trainer.snapshot(str(path), version)


class MadeUpFleet:
    """Answers prompts with the texts of cases.py, other ones at every call."""

    def __init__(self, case: Case) -> None:
        self._case, self._drafting, self._calls = case, True, 0
        self.snapshot: Callable[[], Any] | None = None
        self.sleep = self.prove_target = lambda: None

    def set_drafting(self, on: bool) -> None:
        self._drafting = on

    def sync(self, snapshot: Any) -> SyncReport:
        size = Path(snapshot.path).stat().st_size
        return SyncReport(snapshot.version, 0.0, size, len(snapshot.shapes), snapshot.checksum)

    def recorder_metrics(self) -> dict[str, float]:
        """As of a fleet of one idle engine."""
        with mock.patch.object(fleet_module.ray, "get", return_value=[defaultdict(int)]):
            fleet: Any = SimpleNamespace(servers=[], counts={})
            return fleet_module.Fleet.recorder_metrics(fleet)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Any, version: int, score: bool = False
    ) -> list[RolloutSample]:
        self._calls += 1
        return [self._answer(i, prompt, version, score) for i, prompt in enumerate(prompts)]

    def _answer(self, index: int, prompt: Prompt, version: int, score: bool) -> RolloutSample:
        text = cases.make_text(self._calls, index, self._drafting, self._case.proposable)
        teacher, length = None, len(text.response)
        if score and self._case.teacher is not None:
            top = self._case.teacher
            own, ids, best = cases.make_scores(self._calls, index, length, top)
            teacher = TeacherScores(
                np.array(own, np.float32),
                np.array(ids, np.int32).reshape(length, top),
                np.array(best, np.float32).reshape(length, top),
            )
        reason = "length" if length >= 24 else "stop"
        return sample_of(prompt.sample_id, prompt.prompt_ids, text, version, reason, teacher)


def sample_of(
    name: str,
    prompt: Sequence[int],
    text: Text,
    version: int = 0,
    reason: str = "stop",
    teacher: TeacherScores | None = None,
) -> RolloutSample:
    return RolloutSample(
        sample_id=name,
        data_source="golden",
        prompt_ids=tuple(prompt),
        response_ids=tuple(text.response),
        trace=traces.trace_from_events(text.events, len(text.response)),
        draft_version=version,
        finish_reason=reason,
        teacher=teacher,
        supervised=None if text.generated is None else tuple(text.generated),
    )


def prompts_of(rows: range) -> list[Prompt]:
    return [Prompt(str(row), "golden", tuple(cases.make_prompt(row)), ()) for row in rows]


def conversations_of(cfg: Config, case: Case) -> Loader[RolloutSample] | None:
    if not (case.given and case.supervised):
        return None
    texts = [cases.make_conversation(row) for row in range(14)]
    rows = [sample_of(str(i), cases.make_prompt(100 + i), text) for i, text in enumerate(texts)]
    seed = cfg.data.seed
    return Loader(rows, cases.BASE["warmup.samples_per_update"], cfg.data.shuffle, seed)


@contextmanager
def _no_bar(*args: Any) -> Iterator[Any]:
    yield SimpleNamespace(advance=lambda metrics: None)


def run_case(case: Case, target: Path, folder: Path) -> Record:
    """The controller's loop over the case, with a real trainer and everything else made up."""
    cfg = configure(case, target)
    if case.proposable:
        save_small_draft(cfg, case.proposable, folder / "draft")
    family, draft_config = get_family(cfg.draft.family), draft_config_of(cfg, target_config())
    record, trainer = Record(), trainer_of(cfg, draft_config)
    ignore = SimpleNamespace(
        stage=_no_bar,
        acceptance=lambda *args: None,
        write=lambda *args: None,
        begin=lambda *args: folder,
        commit=lambda *args: None,
        mark_best=lambda *args: None,
    )
    anything: Any = ignore
    made_up: Any = MadeUpFleet(case)
    trainers: Any = LocalTrainers(trainer, record)
    logged: Any = SimpleNamespace(log=lambda step, metrics: record.logged.append(dict(metrics)))
    handed_over: Any = SimpleNamespace(path=folder / "push.safetensors", clear=lambda: None)
    held_out = {"golden": prompts_of(range(50, 53))} if case.held_out else {}
    prompts = Loader(prompts_of(range(10)), 4, cfg.data.shuffle, cfg.data.seed)
    at = Position(prompts, Progress(), conversations_of(cfg, case))
    clock = Stopwatch()
    rollouts = Rollouts(
        cfg=cfg,
        fleet=made_up,
        trainers=trainers,
        snapshots=handed_over,
        position=at,
        benchmarks=Benchmarks(held_out, cfg.data.max_response_length),
        clock=clock,
    )
    size = family.block_size(draft_config, cfg.rollout.num_speculative_tokens)
    blocks = Blocks(size, frozenset(case.proposable) if case.proposable else None)
    shared = {"cfg": cfg, "blocks": blocks, "rollouts": rollouts, "position": at}
    on_policy: dict[str, Any] = {
        "trainers": trainers,
        "steps": case.on_policy,
        "reward": cases.reward if case.reward else None,
        "diagnostics": {},
    }
    loop = Loop(
        stages=(Supervised(**shared, steps=cfg.sft.steps), OnPolicy(**shared, **on_policy)),
        rollouts=rollouts,
        trainers=trainers,
        checkpoints=Checkpoints(
            store=anything, trainers=trainers, position=at, identity={}, clock=clock
        ),
        reporter=StepReporter(
            trackers=logged, console=anything, samples=anything, clock=clock, diagnostics={}
        ),
        progress=at.progress,
        schedule=cfg.trainer,
    )
    loop.run()
    record.weights = weights_of(trainer)
    return record


_CLOCKED = re.compile(r"timing_s/.*|perf/(throughput|idle_share)|opd/weight_sync/seconds")


def losses(case: Case) -> dict[str, Any]:
    """A case, run: what its golden file holds."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        save_target(folder / "target")
        with one_process(folder):
            record = run_case(case, folder / "target", folder)
    raw = hashlib.sha256()
    for tensor in record.weights.values():
        raw.update(tensor.numpy().tobytes())
    shown = {key: v for key, v in record.logged[-1].items() if not _CLOCKED.fullmatch(key)}
    return {
        "machine": machine(),
        "steps": record.steps,
        "weights_sha256": raw.hexdigest(),
        "weights": {
            key: {
                "sum": float(w.double().sum()),
                "norm": math.sqrt(float(w.double().square().sum())),
            }
            for key, w in record.weights.items()
        },
        "last_logged": dict(sorted(shown.items())),
        "metric_names": sorted({key for row in record.logged for key in row}),
    }


def machine() -> dict[str, str]:
    """What decides how floating-point sums are rounded."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return {
        "torch": torch.__version__,
        "cpu": found[1] if found else "unknown",
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


# -- configuration, metric names, aliases, wire form ----------------------------------------------


def recipes() -> list[str]:
    return sorted(recipe_names())


def printed_config(recipe: str) -> str:
    """What `verl-opd train RECIPE --cfg job` prints, with placeholders for this machine's paths."""
    changed = {"HOME": "<HOME>", "VERL_OPD_CACHE": "<CACHE>"}
    out = io.StringIO()
    with mock.patch.dict(os.environ, changed), redirect_stdout(out), redirect_stderr(io.StringIO()):
        assert main(["train", recipe, "--cfg", "job"]) == 0
    return out.getvalue().replace(str(_ROOT), "<ROOT>")


def documented_metrics() -> list[str]:
    """Names, and patterns of names, that docs/metrics.md defines."""
    return sorted({re.sub(r"\\([^d])", r"\1", pattern.pattern) for pattern in docs.documented()})


def undocumented(names: Sequence[str]) -> list[str]:
    return sorted(docs.undocumented(names))


def translated(lines: Sequence[str]) -> dict[str, Any]:
    """The translation of override lines: an error, dropped, or other lines."""
    try:
        found, _ = translate(list(lines))
    except ConfigError:
        return {"outcome": "error", "lines": []}
    return {"outcome": "translated" if found else "dropped", "lines": found}


def alias_table() -> dict[str, dict[str, Any]]:
    """Every row: what it does, and to which keys."""
    rows = dict[str, dict[str, Any]]()
    for key, row in aliases.TABLE.items():
        if isinstance(row, aliases.To):
            rows[key] = {"does": "renames", "keys": [row.new]}
            if isinstance(row.value, dict):
                rows[key]["values"] = row.value
        elif isinstance(row, aliases.With):
            rows[key] = {"does": "decides with others", "keys": list(row.news)}
        elif isinstance(row, aliases.Drop):
            rows[key] = {"does": "drops", "keys": [], "values": list(row.only)}
        else:
            rows[key] = {"does": "unsupported", "keys": []}
    return rows


def wire_fields(events: Sequence[Event], length: int) -> dict[str, Any]:
    """The extra fields of a response of `length` tokens that was drafted like this."""
    return wire.to_extra_fields(traces.trace_from_events(events, length))


def from_wire(fields: dict[str, Any], length: int) -> dict[str, Any] | None:
    """The trace that fields stand for, as plain lists; None when they are an error."""
    try:
        trace = wire.from_extra_fields(fields, length)
    except ValueError:
        return None
    steps = [
        [s.anchor, list(s.drafted), s.accepted, s.committed, list(s.rejected_logprobs)]
        for s in trace.steps
    ]
    return {"length": trace.response_len, "steps": steps, "draft_free": list(trace.draft_free)}
