"""Problems, their order, and their tokens. Importing this package loads neither jax nor a tokenizer
library."""
