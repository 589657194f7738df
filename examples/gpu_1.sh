#!/usr/bin/env bash
# Draft-OPD of Qwen3-4B's DFlash draft on one GPU of 80 GB or more.
#   TRAIN_FILES=prompts.jsonl examples/gpu_1.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch qwen3_4b_dflash_1gpu "$@"
