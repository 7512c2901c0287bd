"""Linears whose weights stay in few bits."""
