"""How many draft tokens to verify, from measured costs and estimated survival."""
