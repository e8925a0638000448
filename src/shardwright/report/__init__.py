"""Pictures and pages from what a run wrote in its folder; nothing here needs torch or a GPU."""
