"""The base version of flash_mla."""
