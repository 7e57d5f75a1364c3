"""The planner: what a plan does, holds and costs on a cluster. Pure functions; imports no engine."""
