"""The attention under the names and signatures that serving engines already call."""
