"""Post-training quantization: one method, one file."""
