#!/usr/bin/env bash
# The whole loop on two CPU cores, the quickstart's recipe: `make quickstart` prepares its target.
#   examples/cpu.sh [key=value ...]
# Variables: examples/lib.sh. DRY_RUN=1 only shows what would run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch quickstart "$@"
