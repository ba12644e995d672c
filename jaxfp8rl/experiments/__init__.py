"""Experiments: a protocol in a file, its cells as runs of `jaxfp8rl train`, and a report from their lines."""
