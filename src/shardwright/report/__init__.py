"""Pictures and pages made from the files in a run folder. This package needs neither torch nor a GPU."""
