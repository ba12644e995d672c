"""The wire format of a weight sync."""
