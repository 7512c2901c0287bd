"""The block drafter: its config, its files, its forward pass."""
