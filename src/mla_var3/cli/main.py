"""The console script `hyper-mla`.

A command `x` is the module `mla_var3.cli.commands.x` with `add_arguments(parser)` and
`x_command(parser, argv)`. Kernels, torch and plots are imported by the command that needs them, so
that help and the list of kernels come at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import mla_var3
from mla_var3.cli.arguments import Parser, leading_words, parse
from mla_var3.cli.console import guarded, usage_errors
from mla_var3.errors import UnknownNameError

COMMANDS = {
    "run": "run a kernel; without one the main job: mla_var6_plus end to end, with a report",
    "profile": "profile a kernel in the richest mode that runs here, or several of its versions",
    "compare": "runs, versions or kernels side by side, against the first of them",
    "bench": "all kernels beside their peers: tables, plots, one HTML page, regression check",
    "list": "kernels, versions, languages, targets, and what runs on this machine",
    "show": "contract, options, cost, tiling candidates and cached tunings of one kernel",
    "predict": "predicted times of all kernels on the devices in the table",
    "choose": "the kernel that mla_attention uses for a problem, and why",
    "plan": "how many tokens to keep decompressed in the memory there is, and the time to expect",
    "clone": "a new version of a kernel from an existing one, under new names",
    "env": "this machine: GPU, versions, programs found and missing, known devices",
    "doctor": "whether and how vLLM or SGLang here will use the kernels, with the exact flag",
}


def build_parser() -> Parser:
    """The parser of the whole program; `run <kernel>` and `show <kernel>` add the kernel's own."""
    parser = Parser(
        prog="hyper-mla",
        description="Multi-head Latent Attention kernels, and the workbench they are made on.",
        epilog="hyper-mla <command> --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"hyper-mla {mla_var3.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


<<<<<<< HEAD
=======
def _add_run(parser: Parser) -> None:
    parser.add_argument("kernel", nargs="?", help="kernel id; left out: the main job")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    job = parser.add_argument_group("main job")
    job.add_argument("--quick", action="store_true", help="smaller steps, about half the time")
    job.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cuda or cpu (default: auto)"
    )
    job.add_argument(
        "--out_dir",
        type=Path,
        metavar="FOLDER",
        help="folder of the report (default: out/overview/<timestamp>)",
    )
    for name in CALL_SIZES:
        add_unset_sizes(job, (name,), f" (default: {SIZES[name]})")


def _add_list(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_show(parser: Parser) -> None:
    parser.add_argument("kernel", help="kernel id, such as mla_var6_plus")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    parser.add_argument("--language", metavar="NAME", help="cutile-dsl or cute-dsl")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_predict(parser: Parser) -> None:
    from mla_var3.cli.commands.predict import add_arguments

    add_arguments(parser)


def _add_choose(parser: Parser) -> None:
    from mla_var3.cli.commands.choose import add_arguments

    add_arguments(parser)


def _add_plan(parser: Parser) -> None:
    from mla_var3.cli.commands.plan import add_arguments

    add_arguments(parser)


def _add_profile(parser: Parser) -> None:
    from mla_var3.cli.commands.profile import add_arguments

    add_arguments(parser)


def _add_compare(parser: Parser) -> None:
    from mla_var3.cli.commands.compare import add_arguments

    add_arguments(parser)


def _add_bench(parser: Parser) -> None:
    from mla_var3.cli.commands.bench import add_arguments

    add_arguments(parser)


def _add_clone(parser: Parser) -> None:
    from mla_var3.cli.commands.clone import add_arguments

    add_arguments(parser)


def _add_doctor(parser: Parser) -> None:
    from mla_var3.cli.commands.doctor import add_arguments

    add_arguments(parser)


_ADD_ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "run": _add_run,
    "profile": _add_profile,
    "compare": _add_compare,
    "bench": _add_bench,
    "list": _add_list,
    "show": _add_show,
    "predict": _add_predict,
    "choose": _add_choose,
    "plan": _add_plan,
    "clone": _add_clone,
    "env": _add_list,
    "doctor": _add_doctor,
}


>>>>>>> engines
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(arguments))


def _dispatch(argv: list[str]) -> int:
    words, rest = leading_words(argv, 1)
    if not words:
        parser = build_parser()
        if argv:
            parse(parser, argv)
        parser.print_help()
        return 0 if not argv else 2
    (name,) = words
    with usage_errors():
        if name not in COMMANDS:
            raise UnknownNameError("command", name, COMMANDS)
    module = command_module(name)
    parser = Parser(prog=f"hyper-mla {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    return int(getattr(module, f"{name}_command")(parser, rest))


<<<<<<< HEAD
def command_module(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"mla_var3.cli.commands.{name}")
=======
def _run(argv: list[str]) -> int:
    kernel, rest = take_kernel(argv)
    if kernel is not None:
        from mla_var3.cli.commands.kernel import run_kernel

        return run_kernel(kernel, rest, prog=f"hyper-mla run {kernel.full_name}")
    from mla_var3.cli.commands.overview import overview_command

    parser = _subparser("run")
    parser.epilog = _RUN_EPILOG
    return overview_command(parse(parser, rest))


def _profile(argv: list[str]) -> int:
    from mla_var3.cli.commands.profile import profile_command

    return profile_command(_subparser("profile"), argv)


def _compare(argv: list[str]) -> int:
    from mla_var3.cli.commands.compare import compare_command

    return compare_command(_subparser("compare"), argv)


def _bench(argv: list[str]) -> int:
    from mla_var3.cli.commands.bench import bench_command

    return bench_command(_subparser("bench"), argv)


def _list(argv: list[str]) -> int:
    values = parse(_subparser("list"), argv)
    from mla_var3.cli.commands.inventory import list_command

    return list_command(values["json"])


def _show(argv: list[str]) -> int:
    kernel, rest = take_kernel(argv)
    if kernel is None:
        if {"-h", "--help"} & set(rest):
            _subparser("show").print_help()
            return 0
        raise UsageError("kernel: expected the name of a kernel, got none")
    from mla_var3.cli.commands.show import show_command

    return show_command(kernel, rest)


def _predict(argv: list[str]) -> int:
    parser = _subparser("predict")
    from mla_var3.cli.commands.predict import predict_command

    return predict_command(parser, argv)


def _choose(argv: list[str]) -> int:
    parser = _subparser("choose")
    from mla_var3.cli.commands.choose import choose_command

    return choose_command(parser, argv)


def _plan(argv: list[str]) -> int:
    parser = _subparser("plan")
    from mla_var3.cli.commands.plan import plan_command

    return plan_command(parser, argv)


def _clone(argv: list[str]) -> int:
    parser = _subparser("clone")
    from mla_var3.cli.commands.clone import clone_command

    return clone_command(parser, argv)


def _env(argv: list[str]) -> int:
    values = parse(_subparser("env"), argv)
    from mla_var3.cli.commands.env import env_command

    return env_command(values["json"])


def _doctor(argv: list[str]) -> int:
    from mla_var3.cli.commands.doctor import doctor_command

    return doctor_command(_subparser("doctor"), argv)


_HANDLERS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "profile": _profile,
    "compare": _compare,
    "bench": _bench,
    "list": _list,
    "show": _show,
    "predict": _predict,
    "choose": _choose,
    "plan": _plan,
    "clone": _clone,
    "env": _env,
    "doctor": _doctor,
}
>>>>>>> engines


if __name__ == "__main__":
    raise SystemExit(main())
