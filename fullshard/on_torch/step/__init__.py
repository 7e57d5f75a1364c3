"""A step of training, evaluation and generation, as a transaction; what the first step checks."""
