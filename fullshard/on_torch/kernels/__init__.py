"""Kernels of a resident step that neither torch nor its compiler has: the loss's softmax, and clipping with Adam in one pass."""
