#!/usr/bin/env bash
# Give a card its own clocks back.
set -euo pipefail
# shellcheck source=scripts/lib-gpu-clock.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib-gpu-clock.sh"

parse_arguments "Undo what lock-gpu-clock.sh did: the card chooses its clocks itself again." "$@"
find_gpu
require_root

marker=$(marker_file)
failed=false
smi_set "reset the SM clock" -rgc || failed=true
smi_set "reset the memory clock" -rmc || failed=true
# Persistence mode is left as the lock found it; without a marker nobody knows, and it stays.
if [[ -f $marker ]] && grep -q '"persistence_before": "Disabled"' "$marker"; then
    smi_set "disable persistence mode" -pm 0 || failed=true
fi
if $DRY_RUN; then
    echo "would remove: $marker"
    exit 0
fi
! $failed || die "card $GPU_INDEX: not all clocks were reset; the marker $marker stays"
rm -f "$marker"
echo "$GPU_NAME (card $GPU_INDEX): clocks reset"
