"""The version of the package, for programs that must not import the rest of it."""

__version__ = "0.1.0"
