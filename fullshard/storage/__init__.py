"""Where bytes rest off the device: fixed host memory and files, with direct requests. Bytes, never models."""
