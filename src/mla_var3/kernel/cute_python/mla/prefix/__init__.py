"""What latent attention over shared prefixes adds to the latent kernel."""
