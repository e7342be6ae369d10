"""Profiling: one module per mode, and what they share."""

from mla_var3.runtime.profiling.modes import default_mode, profile_plan
from mla_var3.runtime.profiling.result import (
    NsightProfType,
    ProfileResult,
    StageFigures,
    parse_mode,
)

__all__ = [
    "NsightProfType",
    "ProfileResult",
    "StageFigures",
    "default_mode",
    "parse_mode",
    "profile_plan",
]
