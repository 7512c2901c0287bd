"""What `flashdraft bench` measures: a model in this process, or a server."""
