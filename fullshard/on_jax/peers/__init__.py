"""Other ways to train the same model on JAX, for benchmarks. Nothing else in fullshard uses them."""
