"""The engine's process, and the front's end of it."""
