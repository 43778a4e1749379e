"""Guesses of what comes next, for the target to verify: one way, one file."""
