"""Dtypes, ranges of shards, streams, and tensors that watch or defer."""
