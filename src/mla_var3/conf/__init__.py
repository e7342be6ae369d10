"""Configuration that ships with the package: devices, models, measured rates and energies."""
