#!/usr/bin/env bash
# Clock profile of the H100.
#
# A full matrix load runs into the power limit of a Hopper card: the boost clocks (1830 MHz and more)
# hold only for light or short work, so a kernel's clock, and its time, would depend on what ran
# before it. 1500 MHz is a choice: a step below boost, near the clock that a large bfloat16 product
# sustained on an H200 (790 TFLOP/s need at least 1461 MHz, see devices.json). Memory runs at the
# highest clock the card lists, which is its normal one.
set -euo pipefail
# shellcheck source=scripts/lib-gpu-clock.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib-gpu-clock.sh"

lock_device "NVIDIA H100*" 1500 max \
    "Lock an H100 to 1500 MHz (SM) and its highest memory clock." "$@"
