"""Optimizer updates of offloaded units: by the GPU, which streams their state, or by the CPU where it lies."""
