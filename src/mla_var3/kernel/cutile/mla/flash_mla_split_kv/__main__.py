"""`python -m mla_var3.kernel.cutile.mla.flash_mla_split_kv [<version>] [options]`."""

from mla_var3.cli.commands.kernel import main_for_design

raise SystemExit(main_for_design(__package__))
