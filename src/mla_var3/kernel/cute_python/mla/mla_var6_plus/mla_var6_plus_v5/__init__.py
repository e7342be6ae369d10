"""Version 5 of mla_var6_plus."""
