"""State, parameters and activations with another home than the device: their memory, updates and copies."""
