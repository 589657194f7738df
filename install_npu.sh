#!/usr/bin/env bash
# Installs verl-opd on a machine with Ascend NPUs: checks the installed packages and adds only those
# that are missing. Safe to run again.
#
#   ./install_npu.sh [--dry-run | --check] [--engines] [--row 0.21.0|0.23.0]
#
#   --dry-run  print every step and its reason, change nothing
#   --check    only compare the installed versions with third_party/versions.json
#   --engines  build vllm and vllm-ascend from third_party/ even if they are installed; needs
#              SOC_VERSION
#   --row      row of versions.json; default: the row of the installed vllm, else that of CANN
#
# PYTHON=/path/to/python chooses the interpreter (default python3). torch and torch_npu are never
# installed, replaced or removed.
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1 # a dry run leaves nothing behind

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
planner=$root/scripts/npu_plan.py
mode=install
row=()
engines=()
sourced=()

say() { printf 'install_npu: %s\n' "$*"; }
die() { printf 'install_npu: error: %s\n' "$*" >&2; exit 1; }

while (($#)); do
    case $1 in
        --dry-run | --check) mode=${1#--}; shift ;;
        --engines) engines=(--engines); shift ;;
        --row) row=(--row "${2:?--row needs a vllm release}"); shift 2 ;;
        -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1 (see --help)" ;;
    esac
done
python=$(command -v "${PYTHON:-python3}") ||
    die "${PYTHON:-python3} was not found: set PYTHON=/path/to/python, 3.10 to 3.12"
[[ $python == /* ]] || python=$PWD/$python
cd "$root" # a working directory that holds a folder named vllm would hide the engine

# Exports the variables that a script of CANN sets. Such scripts read unset variables and their
# caller's arguments, and some end in a failed command: a separate shell without -eu runs them.
# shellcheck disable=SC2016
source_env() {
    local pair
    while IFS= read -r -d '' pair; do
        if [[ $pair =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "${pair?}"; fi
    done < <(
        bash -c 'file=$1; set --; exec 3>&1 >&2; trap "env -0 >&3" EXIT; source "$file"' _ "$1"
    )
}

load_cann() {
    local home=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit/latest} file
    for file in "$home/set_env.sh" "${home%/*}/set_env.sh" /usr/local/Ascend/cann/set_env.sh; do
        if [[ -f $file ]]; then source_env "$file"; sourced+=("$file"); break; fi
    done
    for file in "${home%/*}/nnal/atb/set_env.sh" "${home%/*/*}/nnal/atb/set_env.sh"; do
        if [[ -f $file ]]; then source_env "$file"; sourced+=("$file"); break; fi
    done
}

check() { "$python" "$planner" check "${row[@]}"; }

torch_versions() {
    "$python" "$planner" pins --torch-only | grep -E '^torch(-npu)?==' | tr '\n' ' ' || true
}

perform() {
    local name=$1 command=$2 now
    eval "$command" </dev/null ||
        die "the step '$name' failed (messages above); run this again to repeat it and go on"
    now=$(torch_versions)
    [[ $now == "$torch" ]] ||
        die "the step '$name' changed torch from ${torch% } to ${now:-nothing}; to restore it:" \
            "$python -m pip install --no-deps ${torch% }"
}

perform_all() {
    local name reason command
    while IFS=$'\t' read -r name reason command; do
        say "$name: $reason"
        printf '    %s\n' "$command"
        [[ $mode == dry-run ]] || perform "$name" "$command"
    done <<<"$1"
}

load_cann
if [[ $mode == check ]]; then
    check
    exit
fi
scratch=SCRATCH
if [[ $mode == install ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
fi
blocked=
options=(--shell --python "$python" --scratch "$scratch" "${engines[@]}" "${row[@]}")
plan=$("$python" "$planner" plan "${options[@]}") || blocked=yes
[[ -z $blocked || $mode == dry-run ]] ||
    die "nothing was changed; fix the errors above first"
torch=$(torch_versions)
if [[ -n $plan ]]; then perform_all "$plan"; else say "nothing is missing"; fi
if [[ $mode == dry-run ]]; then
    [[ -z $blocked ]] ||
        die "without --dry-run nothing would be changed either; fix the errors above first"
    exit
fi
check
if ((${#sourced[@]})); then
    say "in every shell that starts a run:$(printf ' source %s;' "${sourced[@]}")"
fi
