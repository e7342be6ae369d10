"""The latent cache and its parts."""
