"""What may be typed after each command, one module for each. None of them loads torch."""
