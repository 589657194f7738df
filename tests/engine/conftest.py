"""Real vLLM engines on tiny random targets, one per target for the whole session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.tiny import MASK_TOKEN_ID
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.drafts.base import DraftFamily
from verl_opd.engines.settings import EngineSettings, Host, Speculation
from verl_opd.rollout.server import GenerateResult, RolloutServer

K = 3
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
FAMILY = get_family("dflash")
SPECULATION = {field.name for field in fields(Speculation)}


@dataclass
class LiveEngine:
    """A started engine and the event loop that hosts it."""

    engine: RolloutServer
    settings: EngineSettings
    draft_config: dict[str, Any]
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Any], timeout: float = 300) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def generate(self, name: str, prompt: Sequence[int], **sampling: Any) -> GenerateResult:
        return self.call(self.engine.generate(name, prompt, {**GREEDY, **sampling}))

    def generate_all(
        self, name: str, prompts: Sequence[Sequence[int]], **sampling: Any
    ) -> list[GenerateResult]:
        async def together() -> list[GenerateResult]:
            work = (
                self.engine.generate(f"{name}-{i}", prompt, {**GREEDY, **sampling})
                for i, prompt in enumerate(prompts)
            )
            return list(await asyncio.gather(*work))

        return self.call(together())


def draft_for(target: Path, directory: Path, seed: int) -> dict[str, Any]:
    """Write a random draft for `target` to `directory`; its config."""
    draft = DraftConfig(
        num_hidden_layers=2, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[0, 2, 5]
    )
    config = FAMILY.derive_config(AutoConfig.from_pretrained(target), draft, K)
    FAMILY.save_pretrained(
        FAMILY.build(config, seed=seed, init_std=0.2).state_dict(), config, directory
    )
    return config


def changed(settings: EngineSettings, **changes: Any) -> EngineSettings:
    """`settings` with fields of it, or of its Speculation, replaced."""
    assert settings.speculation is not None
    drafting = {name: changes.pop(name) for name in SPECULATION if name in changes}
    return replace(settings, speculation=replace(settings.speculation, **drafting), **changes)


def start_engine(target: Path, directory: Path, **changes: Any) -> LiveEngine:
    """With a DFlash draft; `changes` replace fields of the settings or of their Speculation."""
    return serve(target, directory, draft_for(target, directory, seed=0), **changes)


def serve(
    target: Path,
    directory: Path,
    config: dict[str, Any],
    family: DraftFamily = FAMILY,
    **changes: Any,
) -> LiveEngine:
    """An engine with the draft of `family` in `directory`."""
    speculation = Speculation(
        draft_path=str(directory),
        method=family.engine_method,
        num_speculative_tokens=K,
        target_layer_ids=tuple(family.layer_ids(config)),
        mask_token_id=family.mask_token_id(config),
        engine_names=family.engine_names,
    )
    settings = EngineSettings(
        model_path=str(target),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=32,
        host=Host(kv_cache_gb=1),
        speculation=speculation,
    )
    settings = changed(settings, **changes)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    live = LiveEngine(RolloutServer(settings), settings, config, loop)
    live.call(live.engine.start())
    return live


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    target = request.getfixturevalue(f"tiny_{request.param}_dir")
    started = start_engine(target, tmp_path_factory.mktemp("draft") / "draft")
    yield started
    started.call(started.engine.stop())
    started.loop.call_soon_threadsafe(started.loop.stop)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """32 prompts of different lengths over ordinary tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, 250, (4 + i % 9,), generator=generator).tolist() for i in range(32)]
