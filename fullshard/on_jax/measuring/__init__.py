"""What a compiled step costs: time, memory, collectives."""
