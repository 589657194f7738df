#!/usr/bin/env bash
# Draft-OPD of Qwen3-4B's DFlash draft on one node with 8 GPUs.
#   TRAIN_FILES=prompts.jsonl examples/gpu_8.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch qwen3_4b_dflash_8gpu "$@"
