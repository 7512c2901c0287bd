"""Pages: who holds them, where they lie, and how many fit."""
