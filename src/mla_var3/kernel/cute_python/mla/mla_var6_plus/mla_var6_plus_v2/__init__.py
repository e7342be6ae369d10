"""Version 2 of mla_var6_plus."""
