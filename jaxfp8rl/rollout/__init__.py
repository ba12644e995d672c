"""From problems to scored groups of completions, and the one registry of engines."""
