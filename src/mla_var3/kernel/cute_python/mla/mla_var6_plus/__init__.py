"""The mla_var6_plus design: its versions, `mla_var6_plus` being the base."""
