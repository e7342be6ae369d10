# shellcheck shell=bash
# Shared by the GPU clock scripts; meant to be sourced, not run.
#
# Locking sets three things with nvidia-smi: persistence mode (otherwise the driver forgets the
# clocks when its last user ends), the SM clock and the memory clock. If one of them fails, those
# before it are undone. On success a marker file says what was locked, so that profiling can tell;
# scripts/reset-gpu-clock.sh removes it.

GPU_INDEX=0
DRY_RUN=false
GPU_NAME=""
GPU_UUID=""
GPU_PERSISTENCE=""

die() {
    echo "error: $*" >&2
    exit 1
}

usage_error() {
    echo "error: $* (--help lists the options)" >&2
    exit 2
}

print_help() {
    cat <<HELP
usage: ${0##*/} [--gpu INDEX] [--dry-run] [--help]

$1

  --gpu INDEX  the card, by its number or UUID in nvidia-smi (default: 0)
  --dry-run    print the commands and change nothing
  --help       this text

Needs root. The clocks in force are written to \$HYPER_MLA_CLOCK_STATE, or to
/tmp/hyper-mla-clocks-<gpu uuid>.json.
HELP
}

# parse_arguments <help text> [arguments...]
parse_arguments() {
    local help=$1
    shift
    while (($#)); do
        case $1 in
            --dry-run) DRY_RUN=true ;;
            --gpu)
                (($# > 1)) || usage_error "--gpu: expected the number of a card, got nothing"
                GPU_INDEX=$2
                shift
                ;;
            --gpu=*) GPU_INDEX=${1#--gpu=} ;;
            -h | --help)
                print_help "$help"
                exit 0
                ;;
            *) usage_error "unknown argument '$1'" ;;
        esac
        shift
    done
    [[ $GPU_INDEX =~ ^([0-9]+|GPU-[0-9a-fA-F-]+)$ ]] ||
        usage_error "--gpu: expected a number such as 0, or a UUID, got '$GPU_INDEX'"
}

# Fills GPU_NAME, GPU_UUID and GPU_PERSISTENCE.
find_gpu() {
    command -v nvidia-smi >/dev/null ||
        die "nvidia-smi: expected on PATH, got none; install the NVIDIA driver"
    local answer
    if ! answer=$(nvidia-smi -i "$GPU_INDEX" --query-gpu=name,uuid,persistence_mode \
        --format=csv,noheader 2>&1); then
        die "card $GPU_INDEX: expected one that nvidia-smi knows, got: $answer"
    fi
    answer=${answer%%$'\n'*}
    IFS=, read -r GPU_NAME GPU_UUID GPU_PERSISTENCE <<<"$answer"
    GPU_UUID=${GPU_UUID# }
    GPU_PERSISTENCE=${GPU_PERSISTENCE# }
    [[ -n $GPU_NAME && $GPU_UUID == GPU-* ]] ||
        die "card $GPU_INDEX: expected a name and a UUID from nvidia-smi, got: $answer"
}

require_root() {
    $DRY_RUN && return 0
    (($(id -u) == 0)) ||
        die "rights: changing clocks needs root; run: sudo $0 --gpu $GPU_INDEX"
}

marker_file() {
    echo "${HYPER_MLA_CLOCK_STATE:-/tmp/hyper-mla-clocks-$GPU_UUID.json}"
}

# smi_set <what it does> [nvidia-smi arguments...]; in a dry run only prints the command.
smi_set() {
    local what=$1 answer
    shift
    if $DRY_RUN; then
        echo "would run: nvidia-smi -i $GPU_INDEX $*"
        return 0
    fi
    if ! answer=$(nvidia-smi -i "$GPU_INDEX" "$@" 2>&1); then
        echo "error: $what: nvidia-smi -i $GPU_INDEX $* failed: $answer" >&2
        if [[ ${answer,,} == *permission* ]]; then
            echo "       root inside a container is not enough; run it on the host" >&2
        fi
        return 1
    fi
    # Some drivers print this and report success.
    if [[ ${answer,,} == *"not supported"* ]]; then
        echo "error: $what: not supported by this card: $answer" >&2
        return 1
    fi
}

# The supported clocks as lines "memory graphics" in MHz; nothing where the card does not list them.
supported_clocks() {
    nvidia-smi -i "$GPU_INDEX" --query-supported-clocks=memory,graphics \
        --format=csv,noheader,nounits 2>/dev/null | tr -d ' ' | tr ',' ' ' |
        grep -E '^[0-9]+ [0-9]+$' || true
}

# resolve_clocks <SM MHz> <memory MHz or max>; sets SM_MHZ and MEMORY_MHZ, or dies.
resolve_clocks() {
    SM_MHZ=$1
    MEMORY_MHZ=$2
    local clocks memories lowest highest nearest
    clocks=$(supported_clocks)
    if [[ -z $clocks ]]; then
        [[ $MEMORY_MHZ != max ]] ||
            die "memory clock: expected a list of supported clocks from nvidia-smi, got none"
        echo "warning: $GPU_NAME lists no supported clocks; nothing to check them against" >&2
        return 0
    fi
    memories=$(awk '{ print $1 }' <<<"$clocks" | sort -rn | uniq)
    [[ $MEMORY_MHZ != max ]] || MEMORY_MHZ=${memories%%$'\n'*}
    grep -qx "$MEMORY_MHZ" <<<"$memories" ||
        die "memory clock: $GPU_NAME supports $(tr '\n' ' ' <<<"$memories")MHz, got $MEMORY_MHZ"
    read -r lowest highest nearest < <(
        awk -v memory="$MEMORY_MHZ" -v wanted="$SM_MHZ" '
            $1 == memory {
                if (low == "" || $2 < low) low = $2
                if ($2 > high) high = $2
                away = $2 > wanted ? $2 - wanted : wanted - $2
                if (best == "" || away < best) { best = away; near = $2 }
            }
            END { print low, high, near }' <<<"$clocks"
    )
    ((SM_MHZ >= lowest && SM_MHZ <= highest)) ||
        die "SM clock: $GPU_NAME supports $lowest to $highest MHz, got $SM_MHZ"
    if ((nearest != SM_MHZ)); then
        echo "warning: $GPU_NAME has no step at $SM_MHZ MHz; the driver takes $nearest MHz" >&2
        SM_MHZ=$nearest
    fi
}

undo() {
    local state=0
    echo "undoing what was set" >&2
    [[ $1 -lt 3 ]] || smi_set "reset the memory clock" -rmc || state=1
    [[ $1 -lt 2 ]] || smi_set "reset the SM clock" -rgc || state=1
    if [[ $GPU_PERSISTENCE == Disabled ]]; then
        smi_set "disable persistence mode" -pm 0 || state=1
    fi
    ((state == 0)) || echo "error: not all could be undone; see nvidia-smi -q -d CLOCK" >&2
}

# A new file takes the marker's name, so that a link somebody left there is never followed.
write_marker() {
    local file folder temporary
    file=$(marker_file)
    folder=$(dirname "$file")
    temporary=$(mktemp "$folder/.hyper-mla-clocks.XXXXXX") || return 1
    cat >"$temporary" <<JSON
{
  "device": "$GPU_NAME",
  "uuid": "$GPU_UUID",
  "sm_mhz": $SM_MHZ,
  "memory_mhz": $MEMORY_MHZ,
  "persistence_before": "$GPU_PERSISTENCE",
  "date": "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)",
  "boot_id": "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || true)"
}
JSON
    chmod 644 "$temporary"
    mv -fT "$temporary" "$file" || {
        rm -f "$temporary"
        return 1
    }
}

# lock_clocks <SM MHz> <memory MHz or max>
lock_clocks() {
    resolve_clocks "$1" "$2"
    require_root
    smi_set "enable persistence mode" -pm 1 || exit 1
    if ! smi_set "lock the SM clock" -lgc "$SM_MHZ,$SM_MHZ"; then
        undo 1
        exit 1
    fi
    if ! smi_set "lock the memory clock" -lmc "$MEMORY_MHZ,$MEMORY_MHZ"; then
        undo 2
        exit 1
    fi
    if $DRY_RUN; then
        echo "would write: $(marker_file)"
        return 0
    fi
    if ! write_marker; then
        echo "error: cannot write $(marker_file)" >&2
        undo 3
        exit 1
    fi
    echo "$GPU_NAME (card $GPU_INDEX): SM clock $SM_MHZ MHz, memory clock $MEMORY_MHZ MHz"
    echo "reset with: sudo $(dirname "$0")/reset-gpu-clock.sh --gpu $GPU_INDEX"
}

# lock_device <exact name or glob> <SM MHz> <memory MHz or max> <help text> [arguments...]
lock_device() {
    local pattern=$1 sm=$2 memory=$3 help=$4
    shift 4
    parse_arguments "$help" "$@"
    find_gpu
    # shellcheck disable=SC2053  # the right side is a pattern on purpose
    [[ $GPU_NAME == $pattern ]] ||
        die "card $GPU_INDEX: this profile is for '$pattern', got '$GPU_NAME'; use lock-gpu-clock.sh"
    lock_clocks "$sm" "$memory"
}
