"""The version of this package, in a module that imports nothing, so that every part can name it."""

PACKAGE_VERSION = "0.1.0"
