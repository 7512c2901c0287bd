"""A server under users' load: requests come by rate or from clients; what they wait for."""
