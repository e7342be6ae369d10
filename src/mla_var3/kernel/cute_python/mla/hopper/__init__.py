"""What the CuTe DSL kernels for Hopper share."""
