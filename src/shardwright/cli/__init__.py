"""The command line: one module for each verb. A verb calls one documented function of another package."""
