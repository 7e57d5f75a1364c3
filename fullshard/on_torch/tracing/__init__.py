"""The costs of a model, traced on meta tensors."""
