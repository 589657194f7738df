#!/usr/bin/env bash
# Supervised training on conversations with the quickstart's target, on two CPU cores.
#   SFT_FILES=chats.jsonl examples/sft_cpu.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export EXPERIMENT_NAME=${EXPERIMENT_NAME:-quickstart-sft} TOTAL_STEPS=${TOTAL_STEPS:-0}
launch quickstart "$@"
