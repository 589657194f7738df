#!/usr/bin/env bash
# Draft-OPD of Qwen3-4B's DFlash draft on one node of 16 Ascend dies (Atlas A3): 14 students, 2
# teachers, K = 7.
#   TRAIN_FILES=prompts.jsonl examples/npu_16card_a3.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1500}
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-3600}
launch qwen3_4b_dflash_16npu "$@"
