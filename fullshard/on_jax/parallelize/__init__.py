"""Carries a plan out on a model: shardings, units, their updates, the state."""
