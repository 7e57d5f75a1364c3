"""What ranks say to each other, on any engine: agreement, messages, reports of hangs."""
