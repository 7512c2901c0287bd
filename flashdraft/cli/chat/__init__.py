"""A conversation in the terminal: what is typed, what was said, how it is kept and set."""
