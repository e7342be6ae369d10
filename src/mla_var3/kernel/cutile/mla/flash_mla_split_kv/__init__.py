"""The flash_mla_split_kv design: its versions, `flash_mla_split_kv` being the base."""
