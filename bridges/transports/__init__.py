"""Transports of weights into an engine of this process: in place, by vLLM's reload, or as files."""
