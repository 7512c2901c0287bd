"""What every API shares between a request and its answer."""
