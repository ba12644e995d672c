"""Scores of completions, and the processes in which untrusted or slow scorers run and can be killed."""
