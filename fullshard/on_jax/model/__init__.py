"""Models: described, initialised, loaded, called."""
