"""GPTQ on affine, floating-point and GGUF grids."""
