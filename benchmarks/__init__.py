"""Speed, always beside a peer and as a ratio; results are kept under `results/`."""
