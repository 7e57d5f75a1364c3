"""Fixed host memory and temporary files for bytes off the device. Knows bytes, not models."""
