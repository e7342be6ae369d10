"""Version 4 of mla_var6_plus."""
