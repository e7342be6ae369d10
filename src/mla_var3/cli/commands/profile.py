"""`hyper-mla profile`: profile a kernel, or several of its versions and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mla_var3.cli.arguments import Parser, take_kernel, take_option
from mla_var3.cli.console import EXIT_FAILED, EXIT_OK, UsageError, print_error, say, usage_errors
from mla_var3.errors import HyperMlaError
from mla_var3.runtime.paths import KernelId, find_kernel, output_root, timestamp

EPILOG = """\
The other options are those of the kernel, as for run:
  hyper-mla profile mla_var6_plus --b=32 --s=16 --t=4096 --prof_type=nsys
  hyper-mla profile mla_var6_plus --versions v0,v2 --prof_type=event
  hyper-mla profile flash_mla --help
"""


def add_arguments(parser: Parser) -> None:
    """The arguments that are not the kernel's own."""
    parser.epilog = EPILOG
    parser.add_argument("kernel", help="kernel id, such as mla_var6_plus")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    parser.add_argument(
        "--versions",
        metavar="V,V,...",
        help="profile these versions one after another and compare them with the first",
    )
    parser.add_argument(
        "--prof_type",
        metavar="MODE",
        help="profiling mode (default: the richest one that runs here)",
    )


def profile_command(parser: Parser, argv: Sequence[str]) -> int:
    """Profile what the command line names; returns the exit code."""
    from mla_var3.cli.commands.kernel import run_kernel

    listed, rest = take_option(argv, "versions")
    kernel, rest = take_kernel(rest)
    asks_help = bool({"-h", "--help"} & set(rest))
    if kernel is None:
        if asks_help:
            parser.print_help()
            return EXIT_OK
        raise UsageError("kernel: expected the name of a kernel, got none")
    if listed is None or asks_help:
        return run_kernel(kernel, rest, f"hyper-mla profile {kernel.full_name}")
    return _profile_versions(_versions(kernel, listed), rest)


def _versions(kernel: KernelId, listed: str) -> list[KernelId]:
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if not names:
        raise UsageError(f"--versions: expected versions such as v0,v2, got {listed!r}")
    if kernel.number:
        raise UsageError(
            f"--versions: expected the design {kernel.design} alone, got {kernel.full_name} too"
        )
    with usage_errors():
        return [find_kernel(kernel.design, name, kernel.language) for name in names]


def _profile_versions(kernels: Sequence[KernelId], argv: list[str]) -> int:
    """Profile each version into a folder of its own, then compare those that worked."""
    from mla_var3.cli.commands.compare import show_comparison
    from mla_var3.cli.commands.kernel import run_kernel
    from mla_var3.report.compare import RECORD, load_run

    chosen, rest = take_option(argv, "out_dir")
    default = output_root() / "profiles" / "versions" / kernels[0].design / timestamp()
    base = Path(chosen) if chosen else default
    code = EXIT_OK
    done = []
    for kernel in kernels:
        say(kernel.full_name, "bold")
        folder = base / kernel.full_name
        arguments = [*rest, f"--language={kernel.language}", f"--out_dir={folder}"]
        try:
            code = max(code, run_kernel(kernel, arguments, f"hyper-mla profile {kernel.design}"))
        except UsageError:
            raise
        except HyperMlaError as error:  # the other versions may still work
            print_error(f"{kernel.full_name}: {error}")
            code = EXIT_FAILED
            continue
        if (folder / RECORD).is_file():
            done.append(load_run(folder))
    if len(done) > 1:
        show_comparison(done, False, base, None)
    return code
