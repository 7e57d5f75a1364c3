"""Random orders of actions on a sharded state, held against the unsharded model trained by torch's own optimizer.

A seed makes a `Case`: a model, plans, an optimizer, and actions as callers make them: steps, forwards, exceptions, saves, loads,
reads, writes. `python -m tests.fuzz.orders` plays cases; one that is wrong is printed with its shortest sequence of actions.
"""
