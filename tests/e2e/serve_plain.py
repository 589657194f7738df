"""Serves a draft, exported as a speculators file, with plain vLLM, nothing of ours attached; prints
the mean accept length that vLLM itself counted.

usage: serve_plain.py DRAFT PROMPTS.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    from vllm import LLM, SamplingParams

    draft, prompts = sys.argv[1:]
    llm = LLM(
        draft, dtype="float32", enforce_eager=True, max_model_len=128, disable_log_stats=False
    )
    chats = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts, accepted = (
        counts["vllm:spec_decode_num_drafts"],
        counts["vllm:spec_decode_num_accepted_tokens"],
    )
    print(json.dumps({"tau": 1 + accepted / drafts}))


if __name__ == "__main__":
    main()
