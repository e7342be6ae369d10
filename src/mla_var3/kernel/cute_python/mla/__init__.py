"""CuTe DSL kernels for MLA layers."""
