#!/usr/bin/env bash
# Lock the clocks of a card by the profile of its kind, for measurements that can be repeated.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib-gpu-clock.sh
source "$here/lib-gpu-clock.sh"

parse_arguments "Lock the SM and memory clocks of a card by the profile of its kind." "$@"
find_gpu

case $GPU_NAME in
    "NVIDIA GeForce RTX 5090") profile=rtx5090 ;;
    "NVIDIA H200"*) profile=h200 ;;
    "NVIDIA H100"*) profile=h100 ;;
    *)
        known=("$here"/*-lock-gpu-clock.sh)
        known=("${known[@]##*/}")
        die "card $GPU_INDEX: no clock profile for '$GPU_NAME'; there are:" \
            "${known[*]%-lock-gpu-clock.sh}. Copy scripts/${known[0]} to add one"
        ;;
esac

exec "$here/$profile-lock-gpu-clock.sh" "$@"
