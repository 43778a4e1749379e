"""Export formats: one format, one file."""
