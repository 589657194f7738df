"""Checks that training replays what the engine drafted: with greedy proposals, the replayed slot
must choose the token that the engine proposed.

For that, layer ids, positions, mask, anchors, head and weights all have to agree. Without the check
an error in any of them would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl_opd.opd.metrics import StepMetrics

# bf16 engine and bf16 replay may order two tokens this close differently; real faults move them
# much further
NEAR_TIE_NATS = 0.5
_MISMATCH, _RAW = "opd/replay_mismatch", "opd/replay_mismatch_raw"


def replay_metrics(gaps: Tensor, offsets: Tensor) -> StepMetrics:
    """Measurements of replayed slots. gaps [M]: nats by which the slot's best token beats the
    engine's proposal (0 = same choice, NaN counts as a mismatch); offsets [M]: 1-based.

    opd/replay_mismatch: share of slots with a gap above NEAR_TIE_NATS. opd/replay_mismatch_raw:
    share with any gap, also by offset.
    """
    metrics = StepMetrics()
    differs, far = ~(gaps <= 0), ~(gaps <= NEAR_TIE_NATS)
    metrics.add_mean(_MISMATCH, float(far.sum()), gaps.numel())
    metrics.add_mean(_RAW, float(differs.sum()), gaps.numel())
    metrics.add_sum("opd/replay_slots", gaps.numel())
    for offset in offsets.unique().tolist():
        here = offsets == offset
        metrics.add_mean(f"{_RAW}_pos_{offset}", float(differs[here].sum()), float(here.sum()))
    return metrics


def diagnose(
    metrics: Mapping[str, float],
    limit: float | None,
    raw_limit: float | None,
    known: Mapping[str, object],
) -> str | None:
    """None when the check passed or did not run; otherwise what was measured, what is known and
    what to look at. A limit of None never fails.
    """
    if _MISMATCH not in metrics:
        return None
    share, raw = metrics[_MISMATCH], metrics[_RAW]
    if share <= (1.0 if limit is None else limit) and raw <= (
        1.0 if raw_limit is None else raw_limit
    ):
        return None
    by_offset = {
        name.rpartition("_")[2]: value
        for name, value in metrics.items()
        if name.startswith(f"{_RAW}_pos_")
    }
    return (
        f"replay check failed: in {share:.1%} of {metrics['opd/replay_slots']:.0f} slots the "
        "replayed draft rates the engine's proposal more than "
        f"{NEAR_TIE_NATS} nats below its own choice, and by any amount in {raw:.1%} "
        f"(opd.max_replay_mismatch={limit}, "
        f"opd.max_replay_mismatch_raw={raw_limit}; differing by offset: "
        + ", ".join(
            f"{offset} {value:.1%}"
            for offset, value in sorted(by_offset.items(), key=lambda item: int(item[0]))
        )
        + "). Training would supervise states that the engine never met. Known: "
        + ", ".join(f"{name} {value}" for name, value in known.items())
        + ". Check: target_layer_ids (a layer too early or late), rope_theta of the draft, the "
        "draft version in the engine, an LM head or embedding of the draft's own, mask and "
        "positions in the engine. With a limit of null the check only reports."
    )
