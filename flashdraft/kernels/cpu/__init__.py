"""The CPU backend: C kernels in native/, and their Python face."""
