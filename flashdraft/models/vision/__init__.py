"""Towers that turn pictures into rows of a target."""
