"""GGUF files: reading, writing, quantization blocks, tokenizers."""
