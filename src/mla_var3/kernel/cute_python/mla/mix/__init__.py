"""The mix: latent and decompressed attention at the same time."""
