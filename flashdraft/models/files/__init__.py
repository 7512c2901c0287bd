"""Files of checkpoints: found, fetched, checked, opened."""
