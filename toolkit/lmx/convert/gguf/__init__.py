"""llama.cpp's GGUF files: reader, writer, blocks, config and tokenizer."""
