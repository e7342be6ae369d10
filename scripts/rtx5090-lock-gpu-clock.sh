#!/usr/bin/env bash
# Clock profile of the GeForce RTX 5090.
#
# 2407 MHz is the boost clock at which the card's peak rates are specified (devices.json), and 14001
# MHz its full memory clock, so rooflines and measurements mean the same clocks.
set -euo pipefail
# shellcheck source=scripts/lib-gpu-clock.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib-gpu-clock.sh"

lock_device "NVIDIA GeForce RTX 5090" 2407 14001 \
    "Lock a GeForce RTX 5090 to 2407 MHz (SM) and 14001 MHz (memory)." "$@"
