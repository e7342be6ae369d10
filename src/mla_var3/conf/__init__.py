"""Configuration that ships with the package: what is known about each GPU."""
