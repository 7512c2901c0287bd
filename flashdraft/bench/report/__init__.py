"""A run as a table, a page, pictures, or beside another run."""
