"""Ways to quantize a finished model: one method, one file."""
