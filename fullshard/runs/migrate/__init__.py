"""Makes recipes from the configurations of other systems. Nothing of a file is dropped silently, and no code of it runs."""
