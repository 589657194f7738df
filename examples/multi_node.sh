#!/usr/bin/env bash
# Draft-OPD on several nodes of a running Ray cluster (docs/clusters.md): NNODES x GPUS_PER_NODE
# students. Run it on one of the nodes:
#   RAY_ADDRESS=10.0.0.1:6379 NNODES=2 TRAIN_FILES=/shared/prompts.jsonl RUN_DIR=/shared/runs/a \
#       examples/multi_node.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

: "${RAY_ADDRESS:?the address that ray start --head printed, such as 10.0.0.1:6379}"
: "${RUN_DIR:?a folder that all nodes share}"
export NNODES=${NNODES:-2}
export STUDENT_WORLD_SIZE=${STUDENT_WORLD_SIZE:-$((NNODES * ${GPUS_PER_NODE:-8}))}
export TRAIN_PROMPT_BSZ=${TRAIN_PROMPT_BSZ:-$((STUDENT_WORLD_SIZE * 4))}
launch "${RECIPE:-qwen3_4b_dflash_8gpu}" "$@"
