"""The base version of flash_mla_split_kv."""
