"""How weights get into an engine of this process: in place, by vLLM's reload, or as files."""
