"""From the text of a completion to an answer, and from an answer to a score. Loads neither jax nor a
tokenizer."""
