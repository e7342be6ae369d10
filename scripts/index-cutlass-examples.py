#!/usr/bin/env python3
"""Which CuTe DSL examples a CUTLASS checkout has, what they show and what they need.

    scripts/index-cutlass-examples.py [CUTLASS] [--goal GOAL | --path PATH] [--json]
    scripts/index-cutlass-examples.py [CUTLASS] --notes EXAMPLE [--out FILE]

The first two steps of the learn-cute-dsl skill: select and read. Sources are parsed and never
imported, so neither CuTe DSL nor a GPU is needed. Examples are found by name, because releases of
CUTLASS keep them in different folders.
"""

import argparse
import ast
import difflib
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mla_var3.errors import HyperMlaError, InvalidArgumentError, UnknownNameError  # noqa: E402
from mla_var3.runtime.markdown import table  # noqa: E402
from mla_var3.runtime.paths import write_atomic  # noqa: E402

EXAMPLES = Path("examples", "python", "CuTeDSL")

FEATURES = {
    "TMA": r"make_tiled_tma_atom.*|CopyBulk.*|tma_partition",
    "TMA pipeline": r"PipelineTma.*",
    "warp roles": r"setmaxregister_.*|warpgroup_reg_.*",
    "persistent loop": r".*Persistent.*Scheduler.*",
    "mbarriers": r"mbarrier_.*|MbarrierArray",
    "named barriers": r"NamedBarrier|barrier_arrive",
    "swizzled shared memory": r"make_smem_layout.*|.*[Ss]wizzle.*",
    "clusters": r"cluster_(arrive|wait).*|block_idx_in_cluster|.*[Mm]ulticast.*|map_dsmem_ptr",
    "online softmax": r"exp2.*",
    "masks at the edges": r"elem_less|make_identity_tensor",
    "dependent launch": r"griddepcontrol_.*|use_pdl",
    "FP8": r"Float8.*",
    "wgmma": r"warpgroup",
    "tcgen05": r"tcgen05",
}
"""What to look for while reading -> names in the source that show it."""

GOALS = {
    "basics": [f"tutorial_gemm/fp16_gemm_{number}.py" for number in range(7)],
    "software-pipelining": ["dense_gemm_software_pipeline.py"],
    "persistent-kernels": ["dense_gemm_persistent.py"],
    "warpgroup-specialization": ["dense_gemm_persistent_prefetch.py"],
    "attention-pipelining": ["fmha.py"],
    "mla-decode": ["mla/mla_decode_fp16.py", "mla/mla_helpers.py"],
    "mla-decode-fp8": ["mla/mla_decode_fp8.py"],
    "clusters": ["dense_gemm_persistent_dynamic.py"],
    "epilogues": ["custom_epilogue_dense_gemm.py"],
    "dependent-launch": ["programmatic_dependent_launch.py"],
}
"""Learning goal -> examples to start with, in reading order."""

PATHS = {
    "A": [
        *(f"tutorial_gemm/fp16_gemm_{number}.py" for number in (0, 3, 6)),
        "dense_gemm_software_pipeline.py",
        "dense_gemm_persistent.py",
    ],
    "B": ["mla/mla_helpers.py", "mla/mla_decode_fp16.py", "mla/mla_decode_fp8.py", "fmha.py"],
    "C": [
        "dense_gemm_persistent_prefetch.py",
        "dense_gemm_persistent_dynamic.py",
        "custom_epilogue_dense_gemm.py",
        "programmatic_dependent_launch.py",
    ],
}
"""Learning path -> examples: A the language, B MLA, C techniques."""

QUESTIONS = {
    "Host side (`@cute.jit`)": [
        "Which tensors get a TMA descriptor, and with what tile shape?",
        "How are grid and cluster computed?",
        "How does the shared memory budget follow from stages and tiles?",
        "Which launch parameters are set?",
    ],
    "Device side (`@cute.kernel`)": [
        "How do threads, warps and warpgroups get their roles?",
        "How many stages, which barriers, and who produces and consumes?",
        "Which copies are asynchronous, and what announces their arrival?",
        "Where do accumulators live, and what does the main loop wait for?",
        "How is shared memory laid out, swizzled and shared between roles?",
        "How are edges masked, and how is the pipeline drained?",
    ],
}


@dataclass(frozen=True)
class Example:
    """What one source shows, read from its syntax tree.

    Attributes:
        path: relative to the examples folder of the checkout.
        needs: the architecture that its instructions ask for.
        kernels: functions under `@cute.kernel`.
        hosts: functions under `@cute.jit`.
        features: keys of FEATURES that occur.
        lines: length of the file.
    """

    path: str
    needs: str
    kernels: tuple[str, ...]
    hosts: tuple[str, ...]
    features: tuple[str, ...]
    lines: int


def read_example(path: Path, folder: Path) -> Example | None:
    """One source, or None when it has nothing to do with CuTe DSL."""
    text = path.read_text(encoding="utf-8")
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError as error:
        raise InvalidArgumentError(str(path), "Python source", error.msg) from error
    names: set[str] = set()
    for node in nodes:
        for field in ("id", "attr", "arg", "name"):  # names, attributes, keywords, imports
            if isinstance(found := getattr(node, field, None), str):
                names.update(found.split("."))
    if not {"cute", "cutlass"} & names:
        return None
    features = tuple(
        feature
        for feature, pattern in FEATURES.items()
        if any(re.fullmatch(pattern, name) for name in names)
    )
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]

    def under(decorator: str) -> tuple[str, ...]:
        found = rf"(\w+\.)?{decorator}\b"
        return tuple(
            function.name
            for function in functions
            if any(re.match(found, ast.unparse(each)) for each in function.decorator_list)
        )

    relative = path.relative_to(folder).as_posix()
    needs = architecture(features, relative)
    return Example(relative, needs, under("kernel"), under("jit"), features, len(text.splitlines()))


def architecture(features: tuple[str, ...], path: str) -> str:
    """The architecture that a source asks for, by its instructions, else by its folder."""
    for instruction, name in (("tcgen05", "sm_100"), ("wgmma", "sm_90")):
        if instruction in features:
            return name
    if "blackwell_geforce/" in path or Path(path).name.startswith("sm120"):
        return "sm_120"
    for folder, name in (("blackwell", "sm_100"), ("hopper", "sm_90")):
        if folder in Path(path).parts:
            return f"{name}, by its folder"
    return "sm_80 and newer"


def read_examples(checkout: Path) -> list[Example]:
    """All examples of a checkout, by path."""
    folder = checkout / EXAMPLES
    if not folder.is_dir():
        raise InvalidArgumentError("CUTLASS", f"a checkout of CUTLASS with {EXAMPLES}", checkout)
    found = (read_example(path, folder) for path in sorted(folder.rglob("*.py")))
    return [example for example in found if example is not None]


def matching(examples: list[Example], name: str) -> list[Example]:
    """Examples by the end of their path; those for sm_100 first, which the names come from."""
    found = [each for each in examples if f"/{each.path}".endswith(f"/{name}")]
    return sorted(found, key=lambda each: (each.path != name, not each.needs.startswith("sm_100")))


def find_one(examples: list[Example], name: str) -> Example:
    """The example that a user named by its path or the end of it."""
    matches = matching(examples, name)
    if not matches:
        # A checkout has hundreds; only those that look like the name are worth printing.
        known = {Path(each.path).name for each in examples}
        near = difflib.get_close_matches(Path(name).name, known, n=5, cutoff=0.5)
        raise UnknownNameError("example", name, near)
    if len(matches) > 1 and matches[0].path != name:
        paths = ", ".join(each.path for each in matches)
        raise InvalidArgumentError("--notes", "the path of one example", f"{name}: {paths}")
    return matches[0]


def notes(example: Example) -> str:
    """Empty reading notes for an example, its patterns ticked as far as names tell."""
    lines = [f"# Reading notes: {example.path}", "", f"- Needs: {example.needs}"]
    lines += [f"- Kernel: {name}" for name in example.kernels]
    lines += [f"- `@cute.jit` function: {name}" for name in example.hosts]
    lines += ["", "## Questions before reading", "", "1. "]
    for heading, questions in QUESTIONS.items():
        lines += ["", f"## {heading}", "", *(f"- {question}" for question in questions)]
    lines += ["", "## Patterns", ""]
    lines += [f"- [{'x' if each in example.features else ' '}] {each}" for each in FEATURES]
    lines += ["", "## Confirms, refines or contradicts", "", "| page | how |", "|---|---|", ""]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "cutlass",
        nargs="?",
        type=Path,
        default=Path(os.environ.get("HYPER_MLA_CUTLASS_DIR") or ROOT / "third_party" / "cutlass"),
        metavar="CUTLASS",
        help="the checkout (default: $HYPER_MLA_CUTLASS_DIR, or third_party/cutlass)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--goal", metavar="GOAL", help=f"examples for: {', '.join(GOALS)}")
    what.add_argument("--path", metavar="PATH", help="learning path A, B or C, in reading order")
    what.add_argument("--notes", metavar="EXAMPLE", help="reading notes to fill in for one example")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file, not the screen")
    return parser


def run(arguments: argparse.Namespace) -> str:
    """What the arguments ask for, as text."""
    examples = read_examples(arguments.cutlass)
    if arguments.notes is not None:
        return notes(find_one(examples, arguments.notes))
    missing: list[str] = []
    for kind, lists in (("goal", GOALS), ("path", PATHS)):
        if (name := getattr(arguments, kind)) is not None:
            if name not in lists:
                raise UnknownNameError(kind, name, lists)
            found = {each: matching(examples, each)[:1] for each in lists[name]}
            missing = [each for each, matches in found.items() if not matches]
            examples = [example for matches in found.values() for example in matches]
    if arguments.json:
        return json.dumps({"examples": [asdict(each) for each in examples], "missing": missing})
    rows = [
        (each.path, each.needs, len(each.kernels), ", ".join(each.features), each.lines)
        for each in examples
    ]
    text = table(("example", "needs", "kernels", "shows", "lines"), rows)
    return text + "".join(f"\nnot in this checkout: {name}" for name in missing)


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        text = run(arguments).rstrip("\n") + "\n"
        if arguments.out is None:
            print(text, end="")
        else:
            write_atomic(arguments.out, text)
            print(arguments.out)
    except HyperMlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
