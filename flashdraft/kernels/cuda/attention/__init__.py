"""Paged attention."""
