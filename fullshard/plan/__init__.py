"""The decision, as values: the plan, its choices, its optimizer, its JSON and its text. Standard library only."""
