"""Post-training quantization, quantization-aware training and mixed precision."""
