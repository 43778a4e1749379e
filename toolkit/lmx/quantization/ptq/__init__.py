"""Post-training quantization. `methods.METHODS` lists the methods."""
