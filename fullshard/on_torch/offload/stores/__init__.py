"""Where the bytes of offloaded units are stored: device, host memory or files."""
