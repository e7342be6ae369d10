"""The base version of flash_attention."""
