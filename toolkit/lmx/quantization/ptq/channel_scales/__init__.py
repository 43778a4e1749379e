"""Scales that move between layers: the places for them, SmoothQuant's, and AWQ's."""
