"""Version 6 of mla_var6_plus."""
