"""The latent attention kernel for Hopper."""
