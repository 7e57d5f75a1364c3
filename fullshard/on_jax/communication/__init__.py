"""The collectives that XLA compiles."""
