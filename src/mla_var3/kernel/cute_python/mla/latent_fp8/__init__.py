"""The latent kernel for Hopper over a cache in 8 bits."""
