"""What `flashdraft serve` is besides our own server: another engine's, and what it says."""
