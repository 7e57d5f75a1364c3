"""What a plan costs before anybody pays for it: pure functions over plans, descriptions and clusters."""
