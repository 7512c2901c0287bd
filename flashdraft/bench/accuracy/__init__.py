"""Whether answers to a benchmark's tasks are right."""
