"""A step: rows laid out, run, read, and committed."""
