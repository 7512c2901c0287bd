"""Benchmarks, plans and diagnoses: what a pair costs, wins, and lacks."""
