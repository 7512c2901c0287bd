"""The formats in which families write thoughts and calls, and how they are read."""
