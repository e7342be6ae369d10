#!/usr/bin/env bash
# Makes the virtual environment that HyperMLA runs in. See --help.
#
# The environment counts as complete only while it holds a stamp. The stamp is removed before the
# first change and written after the last check, so a run that was cut short is never taken for good.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly ROOT
readonly SCRIPT="$ROOT/$(basename "${BASH_SOURCE[0]}")"
readonly MIN_MAJOR=3 MIN_MINOR=11
# Exact, because on machines without CUDA only an exact request selects the CPU build.
readonly TORCH_REQUIREMENT="torch==2.13.0"
# The extra `cute` takes what serving engines pin; development and records use one release.
readonly CUTE_REQUIREMENT="nvidia-cutlass-dsl==4.8.1"
readonly BASE_EXTRAS="cute,cutile,dev,docs,fit"
readonly OPTIONAL_EXTRAS="profiling"
readonly STAMP_NAME=".hyper-mla-setup"
readonly LOG_NAME="hyper-mla-setup.log"

usage() {
    cat <<USAGE
Usage: ./setup_cutile.sh [--extras LIST] [--force] [--help]

Makes a virtual environment and installs HyperMLA into it, editable, with the cuTile and CuTe DSL
compilers, the development and documentation tools. Needs Linux on x86_64 or aarch64 and Python
$MIN_MAJOR.$MIN_MINOR or newer; no GPU, driver or CUDA toolkit. Running it again is quick and changes nothing
unless pyproject.toml, this script or the interpreter has changed.

Options:
  --extras LIST  also install these, separated by commas: ${OPTIONAL_EXTRAS//,/, }
  --force        delete the environment and build it again
  --help         this text

Environment:
  PYTHON         interpreter to build with (default: the environment's own, or else the first of
                 python3, python3.13, python3.12, python3.11 that is new enough)
  VENV           where the environment lies (default: .venv in the repository)
USAGE
}

say() { printf '[setup] %s\n' "$*"; }

fail() {
    printf '[setup] error: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do printf '[setup]        %s\n' "$line" >&2; done
    exit 1
}

# --- arguments ---------------------------------------------------------------------------------

FORCE=0
ASKED_EXTRAS=""
while (($#)); do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --force) FORCE=1 ;;
        --extras) (($# > 1)) || fail "--extras: expected a list such as profiling, got nothing"
                  ASKED_EXTRAS="$2"; shift ;;
        --extras=*) ASKED_EXTRAS="${1#*=}" ;;
        *) fail "unknown argument '$1'" "See ./setup_cutile.sh --help." ;;
    esac
    shift
done

# sorted_list LIST...: the union of comma-separated lists, sorted.
sorted_list() { printf '%s\n' "$@" | tr ',' '\n' | sed '/^ *$/d; s/ //g' | sort -u | paste -sd, -; }

# contains LIST ITEM
contains() { [[ ",$1," == *",$2,"* ]]; }

for extra in $(sorted_list "$ASKED_EXTRAS" | tr ',' ' '); do
    contains "$BASE_EXTRAS,$OPTIONAL_EXTRAS" "$extra" ||
        fail "--extras: expected some of ${OPTIONAL_EXTRAS//,/, }, got '$extra'"
done

VENV="${VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
readonly VENV
readonly VENV_PYTHON="$VENV/bin/python"
readonly STAMP="$VENV/$STAMP_NAME"
readonly LOG="$VENV/$LOG_NAME"

# --- the machine -------------------------------------------------------------------------------

[[ "$(uname -s)" == Linux ]] ||
    fail "HyperMLA runs on Linux only, and this is $(uname -s)." \
         "On another system, use a Linux container or virtual machine."
case "$(uname -m)" in
    x86_64 | aarch64) ;;
    *) fail "the cuTile compiler exists for x86_64 and aarch64, and this is $(uname -m)." ;;
esac

# --- the interpreter ---------------------------------------------------------------------------

# python_version PROGRAM: 'major.minor.patch', or nothing when it is no Python that runs.
python_version() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

# new_enough VERSION
new_enough() {
    local major minor
    IFS=. read -r major minor _ <<<"$1"
    ((major > MIN_MAJOR || (major == MIN_MAJOR && minor >= MIN_MINOR)))
}

# same_minor VERSION VERSION
same_minor() { [[ "${1%.*}" == "${2%.*}" ]]; }

readonly NAME_ANOTHER="Name another interpreter like this: PYTHON=/path/to/python3.11 ./setup_cutile.sh"

# Sets BASE_PYTHON and BASE_VERSION.
find_python() {
    local found candidate version
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null ||
            fail "PYTHON=$PYTHON: no such program." "$NAME_ANOTHER"
        version="$(python_version "$PYTHON")"
        [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
            fail "PYTHON=$PYTHON does not run as a Python 3 interpreter." "$NAME_ANOTHER"
        new_enough "$version" ||
            fail "Python $MIN_MAJOR.$MIN_MINOR or newer is needed, and PYTHON=$PYTHON is Python $version." \
                 "$NAME_ANOTHER"
        BASE_PYTHON="$PYTHON" BASE_VERSION="$version"
        return
    fi
    found=""
    for candidate in python3 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null || continue
        version="$(python_version "$candidate")"
        [[ -n "$version" ]] || continue
        if new_enough "$version"; then
            BASE_PYTHON="$(command -v "$candidate")" BASE_VERSION="$version"
            return
        fi
        found+="${found:+, }$candidate is Python $version"
    done
    fail "Python $MIN_MAJOR.$MIN_MINOR or newer is needed; ${found:-no python3 was found in PATH}." "$NAME_ANOTHER"
}

# --- is there anything to do? ------------------------------------------------------------------

# stamp_key PYTHON_VERSION: changes when the environment has to be made again.
stamp_key() {
    { cat "$ROOT/pyproject.toml" "$SCRIPT"; printf '%s\n' "$1" "$ROOT"; } | sha256sum | cut -d' ' -f1
}

# stamped FIELD: that field of the stamp, or nothing.
stamped() { [[ ! -f "$STAMP" ]] || sed -n "s/^$1=//p" "$STAMP"; }

# up_to_date VENV_VERSION: whether the stamp is of this key and covers every wanted extra.
up_to_date() {
    local extra have
    [[ -n "$1" && "$(stamped key)" == "$(stamp_key "$1")" ]] || return 1
    have="$(stamped extras)"
    for extra in ${WANTED_EXTRAS//,/ }; do contains "$have" "$extra" || return 1; done
}

# Sets BASE_VERSION and VENV_VERSION; true when the environment can be used as it is.
nothing_to_do() {
    VENV_VERSION=""
    [[ ! -x "$VENV_PYTHON" ]] || VENV_VERSION="$(python_version "$VENV_PYTHON")"
    if [[ -n "${PYTHON:-}" || -z "$VENV_VERSION" ]]; then
        find_python
        [[ -z "$VENV_VERSION" ]] || same_minor "$VENV_VERSION" "$BASE_VERSION" || return 1
    else
        BASE_PYTHON="$VENV_PYTHON" BASE_VERSION="$VENV_VERSION"
    fi
    ((!FORCE)) && up_to_date "$VENV_VERSION"
}

WANTED_EXTRAS="$(sorted_list "$BASE_EXTRAS" "$ASKED_EXTRAS")"
BASE_PYTHON="" BASE_VERSION="" VENV_VERSION=""
report_ready() { say "everything is up to date in $VENV (Python $VENV_VERSION, extras $(stamped extras))"; }
if nothing_to_do; then
    report_ready
    exit 0
fi

# Two setups at once would write over each other. The lock is on this script's own file, so that
# nothing new appears in the checkout.
if command -v flock >/dev/null; then
    exec 9<"$SCRIPT"
    if ! flock -n 9; then
        say "another setup of this checkout is running; waiting for it"
        flock 9
        if nothing_to_do; then
            report_ready
            exit 0
        fi
    fi
fi

# --- the environment ---------------------------------------------------------------------------

# What was chosen before is kept when the environment is only refreshed.
WANTED_EXTRAS="$(sorted_list "$WANTED_EXTRAS" "$(stamped extras)")"
rm -f "$STAMP"

remove_venv() {
    [[ -e "$VENV" ]] || return 0
    [[ -f "$VENV/pyvenv.cfg" || -z "$(ls -A "$VENV")" ]] ||
        fail "VENV=$VENV exists and is not a virtual environment; it is left alone." \
             "Name another place like this: VENV=/path/to/new/folder ./setup_cutile.sh"
    say "removing $VENV: $1"
    rm -rf "$VENV"
}

# An interpreter inside the environment would go with it; what it was made from stays.
outside_python() {
    local outside
    outside="$("$BASE_PYTHON" - "$VENV" 2>/dev/null <<'PY'
import pathlib, sys

if pathlib.Path(sys.prefix).resolve() == pathlib.Path(sys.argv[1]).resolve():
    print(pathlib.Path(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2]))
PY
    )" || true
    [[ ! -x "$outside" ]] || BASE_PYTHON="$outside"
}

outside_python
if ((FORCE)); then
    remove_venv "--force was given"
elif [[ -n "$VENV_VERSION" ]] && ! new_enough "$VENV_VERSION"; then
    remove_venv "it has Python $VENV_VERSION"
    find_python
elif [[ -n "$VENV_VERSION" ]] && ! same_minor "$VENV_VERSION" "$BASE_VERSION"; then
    remove_venv "it has Python $VENV_VERSION and $BASE_VERSION was asked for"
elif [[ -n "$VENV_VERSION" ]] && ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    remove_venv "it has no working pip"
elif [[ -z "$VENV_VERSION" ]]; then
    remove_venv "its interpreter does not run"
fi

if [[ ! -d "$VENV" ]]; then
    "$BASE_PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python $BASE_VERSION ($BASE_PYTHON) comes without the venv module." \
             "Install it (on Debian and Ubuntu the package python${BASE_VERSION%.*}-venv)," \
             "or name another interpreter: PYTHON=/path/to/python3.11 ./setup_cutile.sh"
    say "making a virtual environment in $VENV with Python $BASE_VERSION ($BASE_PYTHON)"
    "$BASE_PYTHON" -m venv "$VENV" ||
        fail "could not make the virtual environment in $VENV." \
             "Nothing was marked as complete; run ./setup_cutile.sh again once the cause is gone."
    VENV_VERSION="$(python_version "$VENV_PYTHON")"
else
    say "completing the virtual environment in $VENV (Python $VENV_VERSION)"
fi
: >"$LOG"
# Taken before the installation: an edit that comes meanwhile then leads to another run.
KEY="$(stamp_key "$VENV_VERSION")"
readonly KEY

# pip_install WHAT ARGUMENT...: shows what pip collects, keeps all of its output in the log.
pip_install() {
    local what="$1"
    shift
    if ! "$VENV_PYTHON" -m pip install --disable-pip-version-check "$@" 2>&1 | tee -a "$LOG" |
        sed -un 's/^Collecting \([^ ]*\).*/[setup]   getting \1/p'; then
        printf '\n' >&2
        tail -n 15 "$LOG" | sed 's/^/    /' >&2
        local cause="pip's full output is in $LOG"
        if grep -qiE 'connection|timed out|temporary failure|unreachable|name resolution|proxyerror' "$LOG"; then
            cause="the package index could not be reached: is the network away? Full output: $LOG"
        fi
        fail "pip could not install $what." "$cause" \
             "The environment is not marked as complete, so nothing half-installed is used:" \
             "run ./setup_cutile.sh again and it goes on from here."
    fi
}

# Whether the environment imports a torch inside the range that pyproject.toml asks for.
has_torch() {
    "$VENV_PYTHON" - "$ROOT/pyproject.toml" >/dev/null 2>&1 <<'PY'
import pathlib, re, sys, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
wanted = next(line for line in project["dependencies"] if re.match(r"torch\b", line))
low, high = re.search(r">=([\d.]+),<([\d.]+)", wanted).groups()

def release(version):
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version).group().split("."))

import torch

sys.exit(not release(low) <= release(torch.__version__) < release(high))
PY
}

if has_torch; then
    say "torch is there already"
else
    say "installing $TORCH_REQUIREMENT"
    pip_install "$TORCH_REQUIREMENT" "$TORCH_REQUIREMENT"
fi
say "installing HyperMLA, editable, with its extras: $WANTED_EXTRAS"
pip_install "HyperMLA and its extras $WANTED_EXTRAS" "$CUTE_REQUIREMENT" -e "$ROOT[$WANTED_EXTRAS]"

say "checking that it imports"
"$VENV_PYTHON" -c 'import mla_var3, torch, cuda.tile, cutlass' >>"$LOG" 2>&1 || {
    tail -n 15 "$LOG" | sed 's/^/    /' >&2
    fail "the environment was installed but does not import mla_var3, torch, cuda.tile and cutlass." \
         "It is not marked as complete. Try ./setup_cutile.sh --force for a fresh one."
}

# The rename makes the stamp appear whole or not at all.
printf 'key=%s\nextras=%s\n' "$KEY" "$WANTED_EXTRAS" >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
say "done: $VENV (Python $VENV_VERSION, extras $WANTED_EXTRAS)"
say "activate it with: source $VENV/bin/activate"
