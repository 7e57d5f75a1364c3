"""Measure this machine: kernels, links, disk and host."""
