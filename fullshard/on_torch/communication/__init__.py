"""Collectives: replaced, quantised, logged, and the memory that they hold."""
