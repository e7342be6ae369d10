"""Names that moved between the releases of CuTe DSL that serving engines pin (4.6 to 4.8)."""

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # up to 4.7
    from cutlass.utils import SmemAllocator

__all__ = ["SmemAllocator"]
