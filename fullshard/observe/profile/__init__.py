"""Profiles of a run: traces to a breakdown, its report and its recommendation."""
