"""Checkpoint formats: GPTQ, AWQ, compressed-tensors, GGUF, PEFT, Hugging Face."""
