"""The version of the package, for programs that must not import more of it."""

__version__ = "0.1.0"
