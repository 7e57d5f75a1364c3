"""The search for the best plan: the space of plans, bounds on their cost, the pick, and why others lost."""
