"""Other systems that train the same model, for benchmarks: one file each. Nothing else in fullshard uses them."""
