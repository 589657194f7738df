#!/usr/bin/env bash
# Creates a virtual environment, installs verl-opd into it and checks that it works. Safe to run
# again: a finished install is only checked.
#
#   scripts/install.sh [--extras cpu,test] [--venv .venv]
#
# PYTHON=/path/to/python chooses the interpreter (3.10 to 3.12); otherwise 3.11 is preferred.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=cpu,test
venv=$root/.venv
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 1; }

while (($#)); do
    case $1 in
        --extras) extras=${2:?--extras needs a comma-separated list}; shift 2 ;;
        --venv) venv=${2:?--venv needs a directory}; shift 2 ;;
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1 (see --help)" ;;
    esac
done
cd "$root"

supported() {
    "$1" -c '
import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate candidates=${PYTHON:-python3.11 python3.12 python3.10 python3 python}
    for candidate in $candidates; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no usable Python found (tried: $candidates): version 3.10, 3.11 or 3.12 with the venv" \
        "module is needed (Debian and Ubuntu: apt-get install python3.11-venv)"
}

make_venv() {
    if [[ -e $venv/bin/python ]] && ! supported "$venv/bin/python"; then
        die "the Python in $venv does not work here or is not 3.10 to 3.12: remove that folder" \
            "and run this again"
    fi
    [[ -x $venv/bin/pip ]] && return
    local base
    base=$(find_python)
    say "creating $venv with $base"
    "$base" -m venv "$venv"
}

# Old pip releases cannot read a pyproject.toml without setup.py for editable installs.
upgrade_pip() {
    if ! "$python" -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 23)'; then
        "$python" -m pip install --quiet --upgrade pip
    fi
}

# The CPU build of vLLM needs the +cpu build of torch, which PyPI does not have. Some mirrors and
# PyTorch's own index do.
install_package() {
    say "installing verl-opd[$extras] (a few GB the first time, some minutes)"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    pip_install && return
    if [[ ,$extras, == *,cpu,* ]] && grep -qE 'torch==[^ ]*\+cpu' "$log"; then
        say "the configured index has no CPU build of torch; taking it from $torch_cpu_index"
        pip_install --extra-index-url "$torch_cpu_index" && return
    fi
    tail -n 20 "$log" >&2
    die "pip could not install verl-opd[$extras]; its last lines are above"
}

# Shows only the large downloads; everything goes to $log.
pip_install() {
    "$python" -m pip install --progress-bar off "$@" -e ".[$extras]" 2>&1 | tee "$log" |
        sed -unE 's/^ *Downloading ([^ ]+) \(([0-9.]+ [MG]B)\).*/  \1 \2/p'
}

# Dependencies bring CUDA builds of torchvision, torchaudio and torchcodec, which break `import
# transformers` beside the CPU torch.
remove_foreign_builds() {
    local name
    for name in torchvision torchaudio torchcodec; do
        if "$python" -m pip show --quiet "$name" 2>/dev/null &&
            ! "$python" -c "import $name" 2>/dev/null; then
            say "removing $name: its build does not fit this torch, and verl-opd does not need it"
            "$python" -m pip uninstall --quiet --yes "$name"
        fi
    done
}

check() { "$python" scripts/check_install.py --extras "$extras" "$@"; }

make_venv
python=$venv/bin/python
stamp=$venv/.verl-opd-installed
inputs=$(cat pyproject.toml scripts/install.sh | sha256sum | cut -d' ' -f1)
wanted="$extras $inputs $("$python" -V)"
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    check --quick && exit 0
    say "the earlier install no longer works; installing again"
fi
rm -f "$stamp"
upgrade_pip
install_package
remove_foreign_builds
check
printf '%s' "$wanted" >"$stamp"
