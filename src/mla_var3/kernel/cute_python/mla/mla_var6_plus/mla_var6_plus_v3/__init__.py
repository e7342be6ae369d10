"""Version 3 of mla_var6_plus."""
