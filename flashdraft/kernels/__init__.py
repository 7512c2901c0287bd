"""Numeric kernels: one interface, one file per backend, chosen once by `select`."""
