"""Sharded states in other training loops. Each module needs its own library, and is imported by whoever has it."""
