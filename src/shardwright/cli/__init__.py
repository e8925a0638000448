"""The command line: one module a verb; what a verb does is a documented call of another package."""
