"""The base version of mla_var6_plus."""
