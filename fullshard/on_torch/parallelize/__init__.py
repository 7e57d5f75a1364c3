"""Carries a plan out on a model: `shard` is the recipe, with a file a choice."""
