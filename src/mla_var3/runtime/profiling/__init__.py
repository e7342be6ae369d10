"""Profiling: one module per mode, and what they share."""

from mla_var3.runtime.profiling.modes import (
    NsightProfType,
    ProfileResult,
    StageFigures,
    default_mode,
    parse_mode,
    profile_plan,
)

__all__ = [
    "NsightProfType",
    "ProfileResult",
    "StageFigures",
    "default_mode",
    "parse_mode",
    "profile_plan",
]
