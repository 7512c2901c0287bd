"""Linears in floats, the head, and what stands between linears."""
