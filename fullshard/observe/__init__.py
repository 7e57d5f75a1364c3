"""Looking at runs: benchmarks, profiles, the page."""
