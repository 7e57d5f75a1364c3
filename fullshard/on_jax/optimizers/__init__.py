"""Optax optimizers, from the values that name them."""
