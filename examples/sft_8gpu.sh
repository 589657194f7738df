#!/usr/bin/env bash
# Supervised training of a new DFlash draft for Qwen3-4B on your conversations, on 8 GPUs.
#   SFT_FILES=chats.jsonl TRAIN_FILES=prompts.jsonl examples/sft_8gpu.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch qwen3_4b_dflash_sft "$@"
