"""The explorer: a local web page of a plan, whose address holds every choice; no torch."""
