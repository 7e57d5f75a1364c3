"""The process group, meshes, messages of ranks, and which of them failed first."""
