"""Peak memory of a step: its allocations replayed through a model of the caching allocator."""
