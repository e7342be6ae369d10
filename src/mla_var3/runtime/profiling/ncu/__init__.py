"""NCU mode, and all that runs and reads Nsight Compute."""

from mla_var3.runtime.profiling.ncu.mode import ncu_profile_plan

__all__ = ["ncu_profile_plan"]
