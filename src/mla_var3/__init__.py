"""HyperMLA: Multi-head Latent Attention kernels and the workbench they are made on.

Importing this package loads neither torch nor a kernel language.
"""

__version__ = "0.1.0"
