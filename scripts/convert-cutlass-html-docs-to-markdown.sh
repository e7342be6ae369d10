#!/usr/bin/env bash
# Markdown pages of the CUTLASS C++ documentation, from a checkout of CUTLASS.
#
# Guides that are markdown already are taken as they are, .rst pages go through pandoc, and the API
# reference comes from Doxygen's XML: doxybook2 exports it as JSON, scripts/doxybook2/render_api.py
# writes the pages. Everything is built in a folder of its own beside the result and takes its place
# at the end, so the result is either the old or the new tree.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")

# Tells a tree that this script made, and may replace, from any other folder.
readonly MARKER=".made-from-cutlass"

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
usage: ${0##*/} [--out FOLDER] [--xml FOLDER] [--help] [CUTLASS]

Build markdown pages of the CUTLASS C++ documentation from a checkout of CUTLASS.

  CUTLASS       the checkout (default: \$HYPER_MLA_CUTLASS_DIR, or third_party/cutlass)
  --out FOLDER  where the pages go (default: docs/cutlass-cpp); a tree that this script made is
                replaced, any other folder is refused
  --xml FOLDER  Doxygen's XML (default: doxygen/xml in the checkout)
  --help        this text

Needs pandoc for .rst pages. Without doxybook2 or the XML the API reference is left out, and the
output says so.
HELP
}

checkout=""
out="$root/docs/cutlass-cpp"
xml=""
while (($#)); do
    case $1 in
        --out | --xml)
            (($# > 1)) && [[ -n $2 ]] || usage_error "$1: expected a folder, got nothing"
            if [[ $1 == --out ]]; then out=$2; else xml=$2; fi
            shift
            ;;
        --out=?*) out=${1#--out=} ;;
        --xml=?*) xml=${1#--xml=} ;;
        -h | --help)
            print_help
            exit 0
            ;;
        -*) usage_error "unknown argument '$1'" ;;
        *)
            [[ -z $checkout ]] || usage_error "CUTLASS: expected one folder, got '$checkout' and '$1'"
            checkout=$1
            ;;
    esac
    shift
done

checkout=${checkout:-${HYPER_MLA_CUTLASS_DIR:-$root/third_party/cutlass}}
guides="$checkout/media/docs/cpp"
images="$checkout/media/images"
xml=${xml:-$checkout/doxygen/xml}
out=${out%/}

[[ -d $checkout ]] || die "CUTLASS: expected a checkout of CUTLASS, got '$checkout', which is no folder"
[[ -d $guides ]] || die "CUTLASS: expected a checkout with media/docs/cpp, got '$checkout'"
if [[ -e $out || -L $out ]]; then
    [[ -d $out && ! -L $out ]] || die "--out: expected a folder, got '$out', which is none"
    if [[ ! -e $out/$MARKER && -n $(ls -A "$out") ]]; then
        die "--out: expected a tree that this script made, or an empty folder, got '$out';" \
            "it has no $MARKER"
    fi
fi

# Why there is no API reference; empty when there can be one.
no_api=""
if ! command -v doxybook2 >/dev/null; then
    no_api="doxybook2: expected on PATH, got none"
elif [[ ! -f $xml/index.xml ]]; then
    no_api="Doxygen XML: expected index.xml in $xml, got none; run doxygen in the checkout first"
fi

rst_pages=$(find "$guides" -type f -name '*.rst' | sort)
if [[ -n $rst_pages ]] && ! command -v pandoc >/dev/null; then
    die "pandoc: expected on PATH to convert .rst pages, got none"
fi
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "PYTHON: expected a Python interpreter, got '$python'"

mkdir -p "$(dirname "$out")"
stage=$(mktemp -d "$(dirname "$out")/.cutlass-docs.XXXXXX")
old=""
clean_up() {
    rm -rf "$stage"
    # Interrupted between the two moves: put the old tree back.
    if [[ -n $old && ! -e $out && -d $old ]]; then mv -T "$old" "$out"; fi
    if [[ -n $old ]]; then rm -rf "$old"; fi
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

tree="$stage/tree"
mkdir "$tree"
cp -R "$guides/." "$tree/"
find "$tree" -type f -name '*.rst' -delete

converted=0
while IFS= read -r page; do
    [[ -n $page ]] || continue
    relative=${page#"$guides/"}
    target="$tree/${relative%.rst}.md"
    if [[ -e $target ]]; then
        echo "kept ${relative%.rst}.md, which is there as markdown; $relative is left out"
        continue
    fi
    pandoc --from=rst --to=gfm --wrap=none --output="$target" "$page" ||
        die "pandoc failed on $relative"
    [[ -s $target ]] || die "pandoc: expected a page from $relative, got an empty file"
    converted=$((converted + 1))
done <<<"$rst_pages"

# The guides reach their pictures by a path that leads out of media/docs/cpp; the pictures move in.
if [[ -d $images ]]; then
    cp -R "$images" "$tree/images"
    while IFS= read -r page; do
        slashes=${page#"$tree/"}
        slashes=${slashes//[^\/]/}
        up=""
        for ((depth = 0; depth < ${#slashes}; depth++)); do up+="../"; done
        sed -i -E "s#(\.\./){$((${#slashes} + 2))}images/#${up}images/#g" "$page"
    done < <(find "$tree" -type f -name '*.md')
fi

mkdir "$tree/api"
if [[ -z $no_api ]]; then
    mkdir "$stage/json"
    doxybook2 --quiet --json --input "$xml" --output "$stage/json" \
        --config "$here/doxybook2/config.json" || die "doxybook2 failed on $xml"
    "$python" "$here/doxybook2/render_api.py" "$stage/json" "$tree/api"
else
    cat >"$tree/api/index.md" <<PAGE
# CUTLASS C++ API

Not exported here. The reference needs doxybook2 on PATH and the XML that doxygen writes in the
checkout; then run scripts/${0##*/} again.
PAGE
fi

revision=$(git -C "$checkout" rev-parse HEAD 2>/dev/null || true)
title_of() {
    local title
    title=$(grep -m 1 -E '^# +[^ ]' "$1" || true)
    title=${title#\#}
    echo "${title:-$(basename "$1" .md)}" | sed -E 's/^ +//; s/ +$//; s/[][]//g; s/ *\{#.*\}$//'
}
if [[ ! -e $tree/index.md ]]; then
    {
        echo "# CUTLASS C++"
        echo
        echo "Made from a checkout of CUTLASS${revision:+ at $revision}; the text is NVIDIA's."
        echo
        echo "- [API reference](api/index.md)"
        find "$tree" -type f -name '*.md' ! -path "$tree/api/*" ! -path "$tree/index.md" | sort |
            while IFS= read -r page; do
                echo "- [$(title_of "$page")](${page#"$tree/"})"
            done
    } >"$stage/index.md"
    mv "$stage/index.md" "$tree/index.md"
fi
echo "${revision:-unknown revision}" >"$tree/$MARKER"

pages=$(find "$tree" -type f -name '*.md' ! -path "$tree/api/*" | wc -l)
api_pages=$(find "$tree/api" -type f -name '*.md' | wc -l)
if [[ -d $out ]]; then
    old=$(mktemp -d "$(dirname "$out")/.cutlass-docs-old.XXXXXX")
    mv -T "$out" "$old"
fi
mv -T "$tree" "$out"

echo "$out: $((pages)) pages, $converted of them converted from .rst"
if [[ -z $no_api ]]; then
    echo "API reference: $((api_pages)) pages, from $xml"
else
    echo "API reference left out: $no_api"
fi
