"""What a model is made of and what computing it costs, as values. Standard library only."""
