"""Writers of a run's records: one file for each kind of destination, and the table that lists them."""
