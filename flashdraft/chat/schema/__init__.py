"""JSON schemas: what they say, and as rules of a grammar."""
