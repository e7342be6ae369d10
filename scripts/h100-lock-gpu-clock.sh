#!/usr/bin/env bash
# Clock profile of the H100.
#
# The clocks of the H200 profile, for the reason that h200-lock-gpu-clock.sh gives.
set -euo pipefail
# shellcheck source=scripts/lib-gpu-clock.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib-gpu-clock.sh"

lock_device "NVIDIA H100*" 1500 max \
    "Lock an H100 to 1500 MHz (SM) and its highest memory clock." "$@"
