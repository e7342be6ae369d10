"""`python -m mla_var3.kernel <kernel> [<version>] [options]`."""

from mla_var3.cli.commands.kernel import main

raise SystemExit(main())
