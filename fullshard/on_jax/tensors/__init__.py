"""Dtypes and stacked arrays."""
