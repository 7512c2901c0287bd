"""Numeric kernels: one interface, chosen once by `select`; a folder for each kind of device."""
