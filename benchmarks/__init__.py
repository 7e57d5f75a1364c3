"""Benchmarks. Each compares fullshard with a peer or a prediction; results are in `results/`."""
