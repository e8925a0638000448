"""The version of this package, in a module without imports, so that every module can import it."""

PACKAGE_VERSION = "0.1.0"
