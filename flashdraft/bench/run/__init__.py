"""The sweep itself: in this process, or at an endpoint."""
