"""Known bugs in families, each put into our own code by tests/training/test_mutations.py; docs/mutations.md lists them.

Numbers are those of the list of known silent bugs. 18 is in tests/data. To add one: a row in the module of its family,
or under the family's name in the module of a feature, with the code as it is, the code as the bug has it, and where it
shows. `tables` has all of them. Nothing is imported here: a test that needs one module has not to wait for the others,
which import much of the tests.
"""
