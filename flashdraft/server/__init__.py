"""The HTTP server: an asyncio front, and the engine in a process of its own behind one socket."""
