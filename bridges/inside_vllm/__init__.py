"""All code that depends on vLLM's internals: layouts, parameters, formats, environment."""
