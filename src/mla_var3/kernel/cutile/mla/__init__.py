"""cuTile kernels for MLA layers."""
