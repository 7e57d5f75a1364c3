"""Activations that leave the device between forward and backward, for host memory or a file."""
