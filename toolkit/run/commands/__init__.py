"""The verbs of `lmx` that read run folders."""
