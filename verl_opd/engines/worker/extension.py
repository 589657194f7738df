"""The vLLM worker extension: the methods that a server calls through `collective_rpc`. Their names
have a prefix, because vLLM does not allow names that a worker already has.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from verl_opd.engines.worker.cpu import fix_sampling, keep_drafts_loadable
from verl_opd.engines.worker.draft_loader import DraftLoader, draft_model, target_checksum
from verl_opd.engines.worker.hooks import attach
from verl_opd.engines.worker.recorder import VerifyRecorder
from verl_opd.snapshot import checksum


class OpdWorkerExtension:
    """Mixed into the engine worker (EngineArgs.worker_extension_cls). It returns plain data only,
    so no pickle is needed.

    It is constructed before the models load and must not raise: a failure is kept, and the start-up
    probe reports it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker: Any = object.__new__(cls)
        worker.opd_failure = ""
        try:
            keep_drafts_loadable()
        except Exception:  # raising here would kill the engine core without a message
            worker.opd_failure = traceback.format_exc(limit=3)
        return worker

    def opd_install(self: Any, engine_names: list[tuple[str, str]]) -> dict[str, Any]:
        """Attach recorder, loader and switch to the live runner, once. Returns what the start-up
        probe compares: `failure`, empty when all is attached, and the keys of _drafter_probe.
        """
        if self.opd_failure:
            return {"failure": self.opd_failure}
        try:
            runner = self.model_runner
            if hasattr(self, "opd_recorder"):
                return {"failure": "", "hook": "attached before", **_drafter_probe(runner)}
            probe = {**_drafter_probe(runner), "fixed_sampling": fix_sampling()}
            recorder = VerifyRecorder(_live_requests(runner))
            hook, switch = attach(runner, recorder)
            self.opd_recorder, self.opd_switch, self.opd_loader = (
                recorder,
                switch,
                DraftLoader(runner, engine_names),
            )
            return {"failure": "", "hook": hook, **probe}
        except Exception as error:  # the start-up probe reports it and stops the run
            return {"failure": f"{type(error).__name__}: {error}"}

    def opd_pop_traces(self: Any, external_ids: list[str]) -> dict[str, Any]:
        popped: dict[str, Any] = self.opd_recorder.pop(external_ids)
        return popped

    def opd_load_draft(self: Any, path: str, version: int, checksum: str) -> dict[str, Any]:
        try:
            report: dict[str, Any] = self.opd_loader.load(path, version, checksum)
        # as data: an exception would end the engine, which still serves the old draft
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", **self.opd_loader.read_back()}
        return {"error": "", **report}

    def opd_read_back(self: Any) -> dict[str, Any]:
        report: dict[str, Any] = self.opd_loader.read_back()
        return report

    def opd_target_checksum(self: Any) -> str:
        return target_checksum(self.model_runner)

    def opd_set_drafting(self: Any, enabled: bool) -> bool:
        return bool(self.opd_switch.set(enabled))

    def opd_set_recording(self: Any, enabled: bool) -> None:
        self.opd_recorder.enabled = enabled

    def opd_stats(self: Any) -> dict[str, Any]:
        stats: dict[str, Any] = self.opd_recorder.stats()
        return stats


def _drafter_probe(runner: Any) -> dict[str, Any]:
    """What the engine really drafts with, read from its live objects and not from its arguments."""
    model = draft_model(runner)
    drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator
    target = runner.get_model()
    core = getattr(target, "model", target)
    aux = getattr(core, "aux_hidden_state_layers", ())
    return {
        "method": runner.speculative_config.method,
        "num_speculative_tokens": int(runner.speculative_config.num_speculative_tokens),
        "mask_token_id": int(drafter.parallel_drafting_token_id)
        if getattr(drafter, "parallel_drafting", False)
        else None,
        "aux_layer_ids": [int(i) for i in aux],
        "tensor_parallel_size": int(runner.parallel_config.tensor_parallel_size),
        "token_map": _token_map(model),
        "own_mask_embedding": bool(getattr(model.model, "has_separate_mask_embedding", False)),
        "draft_class": type(model).__name__,
        "runner_class": type(runner).__name__,
        "async_scheduling": bool(getattr(runner, "use_async_scheduling", False)),
    }


def _live_requests(runner: Any) -> Callable[[str], bool]:
    """Whether the engine still holds the request of an internal id: V1 keeps `requests`, V2
    `req_states.req_id_to_index`.
    """
    return lambda name: (
        name
        in (runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index)
    )


def _token_map(model: Any) -> str | None:
    """Digest of the map from draft ids to target ids; None for a draft over the
    whole vocabulary.
    """
    offsets = getattr(model, "draft_id_to_target_id", None)
    return None if offsets is None else checksum({"d2t": offsets.detach()})
