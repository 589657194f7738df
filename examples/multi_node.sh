#!/usr/bin/env bash
# Draft-OPD over several nodes of a Ray cluster that runs already (docs/clusters.md). Run it on one of them; NNODES x GPUS_PER_NODE students.
#   RAY_ADDRESS=10.0.0.1:6379 NNODES=2 TRAIN_FILES=/shared/prompts.jsonl RUN_DIR=/shared/runs/a examples/multi_node.sh [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

: "${RAY_ADDRESS:?the address that ray start --head printed, such as 10.0.0.1:6379}"
: "${RUN_DIR:?a folder that all nodes share}"
export NNODES=${NNODES:-2}
export STUDENT_WORLD_SIZE=${STUDENT_WORLD_SIZE:-$((NNODES * ${GPUS_PER_NODE:-8}))}
export TRAIN_PROMPT_BSZ=${TRAIN_PROMPT_BSZ:-$((STUDENT_WORLD_SIZE * 4))}
launch "${RECIPE:-qwen3_4b_dflash_8gpu}" "$@"
