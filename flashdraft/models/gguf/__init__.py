"""GGUF files: weights, config and tokenizer."""
