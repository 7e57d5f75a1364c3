"""The commands, a file a family: each parses, calls one function and prints."""
