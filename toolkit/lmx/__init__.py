"""lmx: train, quantize, distil and prove language models on MLX."""

__version__ = "0.1.0"
