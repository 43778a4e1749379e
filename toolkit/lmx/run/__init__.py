"""The run folder and everything that is written into it."""
