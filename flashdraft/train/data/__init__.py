"""Prompts, and the target's answers to them."""
