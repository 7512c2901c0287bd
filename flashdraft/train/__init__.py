"""Drafters trained from a target alone, or from given prompts."""
