"""Routes about the server itself, by subject: its state, its models, tokens, the web page."""
