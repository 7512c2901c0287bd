"""What a checkpoint's config.json says: every key used, without effect, or refused."""
