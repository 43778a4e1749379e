"""Grids of quantization-aware training: one file each, found by their names."""
