"""Runtime of HyperMLA: plans, kernel front ends, measurement, and the CPU tile interpreter."""
