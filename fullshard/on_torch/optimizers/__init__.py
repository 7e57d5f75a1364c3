"""Adam in every form, with its kernels, and optimizers of torch on shards."""
