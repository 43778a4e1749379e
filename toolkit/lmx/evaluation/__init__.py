"""Measurements of models."""
