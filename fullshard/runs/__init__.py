"""Runs: from a recipe to a trained model, on any engine."""
