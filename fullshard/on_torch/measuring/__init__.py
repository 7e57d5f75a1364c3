"""This machine, timed."""
