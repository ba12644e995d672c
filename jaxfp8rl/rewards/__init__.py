"""Scores of completions, and the killable process in which untrusted or slow scorers run."""
