"""Private names of torch, each in one place."""
