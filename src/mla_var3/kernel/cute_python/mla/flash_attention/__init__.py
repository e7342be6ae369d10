"""The flash_attention design: its versions, `flash_attention` being the base."""
