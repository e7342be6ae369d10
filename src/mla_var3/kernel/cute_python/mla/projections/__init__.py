"""The projections into and out of the latent space, for Hopper."""
