"""CuTe DSL programs on the host: arguments, compile cache, launch."""
