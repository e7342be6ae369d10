"""The model of time: rates, the mix, how much to keep decompressed."""
