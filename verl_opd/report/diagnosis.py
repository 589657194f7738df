"""Recognises a run that learns nothing, and reports once what to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_PATIENCE = 5  # OPD steps
_USELESS_TAU = 1.05


@dataclass
class Symptom:
    """A sign that a run learns nothing."""

    sign: str  # what was seen
    checks: tuple[str, ...]  # what to check, most likely first


_STALE = (
    "does the engine draft with the weights that training pushes? (version and checksum below; "
    "logs/rollout_*.log)"
)
_LAYERS = "target_layer_ids: a layer too early or late halves acceptance without any error"
_MASK = "mask_token_id: the token that the draft was trained with"
_HEAD = "a draft with its own LM head: the engine must use that head, not the target's"
_TEMPLATE = (
    "the chat template and its switches (thinking on or off) must be those that the draft was "
    "trained with"
)

SYMPTOMS: dict[str, Symptom] = {
    "useless_draft": Symptom(
        f"accept length below {_USELESS_TAU} for {_PATIENCE} OPD steps",
        (
            _STALE,
            _LAYERS,
            _MASK,
            _HEAD,
            _TEMPLATE,
            "a random draft needs supervised steps first: sft.steps",
        ),
    ),
    "no_verify_steps": Symptom(
        "no sample has a verify step (empty_reject_ratio 1)",
        (
            "recorder errors below, and logs/rollout_*.log",
            "responses of one token: data.max_response_length, or an end-of-text token right "
            "after the prompt",
            "target logits that are not finite, which accept everything: weights lost in sleep "
            "(level 2) or loaded with load_format=dummy",
        ),
    ),
    "zero_loss": Symptom(
        "the loss is exactly 0",
        (
            "nothing was supervised: opd_effective_token_ratio, opd.*_stream_weight",
            "no verify step was recorded",
            _STALE,
        ),
    ),
    "all_skipped": Symptom(
        f"every update of {_PATIENCE} OPD steps was skipped: loss or gradient are not finite, or "
        "nothing was supervised",
        (
            "log-probs of rejected tokens or target logits that are not finite: weights damaged by "
            "sleep, or an overflow in target.dtype",
            "opd_effective_token_ratio 0: no verify step was recorded, or weights of both streams "
            "leave nothing",
            "too high a learning rate has made the weights diverge: restart from the last good "
            "checkpoint",
        ),
    ),
    "all_clipped": Symptom(
        "every response runs to data.max_response_length",
        (
            "is the end token among the target's eos ids (generation_config.json)?",
            _TEMPLATE,
            "target weights damaged by sleep or load_format=dummy produce text without end",
            "the limit may be too low for this data",
        ),
    ),
}


@dataclass
class Diagnosis:
    """Looks at each OPD step's metrics; a symptom is reported once a run."""

    reported: set[str] = field(default_factory=set)  # names of symptoms that were reported
    useless: int = 0  # steps in a row with a useless accept length
    skipped: int = 0  # steps in a row in which every update was skipped

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Names of symptoms that show now for the first time."""
        tau = metrics.get("opd/rollout/accept_length/mean")
        if tau is not None:
            self.useless = self.useless + 1 if tau < _USELESS_TAU else 0
        if updates := metrics.get("actor/updates"):
            self.skipped = self.skipped + 1 if metrics.get("actor/skipped_steps") == updates else 0
        showing = {
            "all_skipped": self.skipped >= _PATIENCE,
            "useless_draft": self.useless >= _PATIENCE,
            "no_verify_steps": metrics.get("opd/rollout/empty_reject_ratio") == 1,
            "zero_loss": metrics.get("actor/distillation/loss") == 0,
            "all_clipped": metrics.get("response_length/clip_ratio") == 1,
        }
        fresh = [name for name, shows in showing.items() if shows and name not in self.reported]
        self.reported.update(fresh)
        return fresh


def checklist(name: str, metrics: Mapping[str, float], diagnostics: Mapping[str, object]) -> str:
    """A text that helps to find the cause: the sign, what to check, and the known values
    (measurements and `diagnostics`).
    """
    symptom = SYMPTOMS[name]
    measured = (
        "opd/weight_sync/version",
        "training/update_step",
        "opd/recorder/errors",
        "opd/recorder/broken_traces",
        "opd/replay_mismatch",
    )
    known = {key: f"{metrics[key]:g}" for key in measured if key in metrics} | dict(diagnostics)
    lines = [f"diagnosis: {symptom.sign}. Check, in this order:"]
    lines += [f"  {index}. {check}" for index, check in enumerate(symptom.checks, start=1)]
    lines += ["known:", *(f"  {key}: {value}" for key, value in known.items())]
    return "\n".join(lines)
