"""The quantize stage."""
