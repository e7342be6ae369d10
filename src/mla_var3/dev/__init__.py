"""Tools for people who write kernels; nothing of the product imports them."""
