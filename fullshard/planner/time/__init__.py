"""Seconds of a step: kernels, collectives and offload traffic on a timeline of lanes."""
