"""Everything that knows vLLM's internals: layouts, parameters, formats, environment."""
