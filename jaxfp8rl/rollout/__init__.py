"""Sample completions for problems, score them in groups, and the one registry of engines."""
