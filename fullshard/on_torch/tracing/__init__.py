"""What a module costs, from traces on meta tensors."""
