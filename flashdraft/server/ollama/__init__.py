"""Ollama's API: the part of it that reads and answers."""
