"""The base version of cutlass_mla_decode."""
