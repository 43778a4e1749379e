"""The Python API: every name of `lmx`, one concept per module."""
