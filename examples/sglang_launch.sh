#!/usr/bin/env bash
# SGLang's server with HyperMLA's attention:
#   examples/sglang_launch.sh MODEL [options of sglang.launch_server]
#   examples/sglang_launch.sh --dummy [options]
# --dummy makes a small DeepSeek-V3 with random weights, to see that the server starts. Needs a Hopper
# GPU and pip install "hyper-mla[sglang]". With drafts, for example:
#   --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
set -euo pipefail

(($#)) || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model="$1"
shift
extra=()
if [[ "$model" == --dummy ]]; then
    model="$(mktemp -d)"
    python3 - "$model" "$(dirname "$0")/vllm_deepseek.py" <<'PY'
import json, pathlib, runpy, sys

config = runpy.run_path(sys.argv[2])["DUMMY"]
pathlib.Path(sys.argv[1], "config.json").write_text(json.dumps(config))
PY
    extra=(--load-format dummy --skip-tokenizer-init)
fi
exec python3 -m sglang.launch_server --model-path "$model" --attention-backend hyper_mla \
    ${extra[@]+"${extra[@]}"} "$@"
