"""What an answer must match, compiled for the engine."""
