"""Rows, templates and batches."""
