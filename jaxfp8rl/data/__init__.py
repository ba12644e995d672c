"""Problems, their order, and the tokens they become. Importing this package loads neither jax nor a tokenizer
library."""
