"""Checkpoints and weights of other libraries, read and written without running code of theirs."""
