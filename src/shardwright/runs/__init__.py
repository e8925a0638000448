"""The folder of a run: the names of its files, and the records in them."""
