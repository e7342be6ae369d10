"""What computes a call."""
