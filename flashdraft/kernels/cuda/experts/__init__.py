"""Mixtures of experts, in floats and in few bits."""
