"""The draw in Triton."""
