"""Models: loaded, called, initialised, filled; buffers that change."""
