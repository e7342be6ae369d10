"""The flash_mla design: its versions, `flash_mla` being the base."""
