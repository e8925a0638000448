"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no reason for a property to fail; pytest's own timeout ends what hangs.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
