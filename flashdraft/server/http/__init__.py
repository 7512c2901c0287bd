"""Around the routes: who may ask, how much, and how errors and streams are answered."""
