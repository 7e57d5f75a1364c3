"""From the name of a model, or the config.json of one, to a function that builds it."""
