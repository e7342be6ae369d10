"""The cutlass_mla_decode design: its versions, `cutlass_mla_decode` being the base."""
