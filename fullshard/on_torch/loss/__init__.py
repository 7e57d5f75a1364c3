"""Losses, whole and by chunks, and what batches must hold for them."""
