"""Checkpoint formats: importers, exporters and GGUF."""
