#!/usr/bin/env bash
# Supervised training of a new DFlash draft for Qwen3-4B on your conversations, on 16 Ascend dies.
# Its blocks of 16 are the longest that an NPU drafts.
#   SFT_FILES=chats.jsonl TRAIN_FILES=prompts.jsonl examples/sft_16npu.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1500}
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-3600}
export STUDENT_WORLD_SIZE=${STUDENT_WORLD_SIZE:-16}
graphs='{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [16, 32, 64]}'
export VLLM_COMPILATION_CONFIG=${VLLM_COMPILATION_CONFIG:-$graphs}
launch qwen3_4b_dflash_sft trainer.device=npu "$@"
