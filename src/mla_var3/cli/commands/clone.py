"""`hyper-mla clone`: a new version of a kernel from an existing one, under new names."""

from __future__ import annotations

from collections.abc import Sequence

from mla_var3.cli.arguments import Parser
from mla_var3.cli.console import EXIT_OK, note, say, usage_errors
from mla_var3.dev.clone import ClonePlan, plan_clone, write_clone
from mla_var3.runtime.paths import DEFAULT_LANGUAGE, discover_kernels


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_argument("source", help="full name of the version to copy: mla_var6_plus_v2")
    parser.add_argument("version", help="the new version: v5")
    parser.add_option("language", "NAME", "cutile-dsl or cute-dsl", default=DEFAULT_LANGUAGE)
    parser.add_flag("dry_run", "show the new names, write nothing")


def clone_command(parser: Parser, argv: Sequence[str]) -> int:
    """Clone what the command line names; returns the exit code."""
    values = parser.parse(argv)
    with usage_errors():
        plan = plan_clone(values["source"], values["version"], values["language"])
    if values["dry_run"]:
        say(f"{plan.target.full_name} from {plan.source.full_name}, not written: {plan.folder}")
    else:
        write_clone(plan)
        say(f"{plan.target.full_name} from {plan.source.full_name}: {plan.folder}", "bold")
    name, language = plan.target.full_name, plan.target.language
    for other in discover_kernels():
        if other.full_name == name and other.language != language:
            note(f"{name} exists in {other.language}: an id means one idea in every language")
    _print_names(plan)
    if not values["dry_run"]:
        _print_next(plan)
    return EXIT_OK


def _print_names(plan: ClonePlan) -> None:
    for before, after in plan.files.items():
        say(f"  {after}" if before == after else f"  {after}  (was {before})")
    say("names:")
    for before, after in plan.renames.items():
        say(f"  {before} -> {after}")


def _print_next(plan: ClonePlan) -> None:
    design = plan.target.module.rsplit(".", 2)[0]
    entry = plan.folder / f"{plan.target.full_name}.py"
    say("next:")
    say(f"  write the idea beside 'Parent: {plan.source.full_name}.' in {entry}")
    say("  make format    # longer names may need new line breaks")
    command = f"  python -m {design} {plan.target.version}"
    on_cpu = plan.target.language == DEFAULT_LANGUAGE
    if not on_cpu:
        say(f"{command} --prof_type=static    # without a GPU")
    say(f"{command} --prof_type=disabled --check{'' if on_cpu else '    # with one'}")
