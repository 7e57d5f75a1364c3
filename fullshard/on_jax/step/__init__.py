"""A step of training, evaluation and generation, and what the first step is held against."""
