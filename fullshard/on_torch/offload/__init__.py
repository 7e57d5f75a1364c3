"""State and activations that rest away from the device: where, and how they are updated, sent and fetched."""
