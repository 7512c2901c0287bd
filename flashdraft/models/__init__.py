"""Targets and drafters: configs, files, layers, tokenizers."""
