"""Multi-head Latent Attention: the problem, its inputs, its reference and its cost.

`problem` and `cost` are plain Python; `inputs` and `reference` need torch, so nothing is imported
here and a caller names the module it wants.
"""
