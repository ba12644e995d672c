"""Sources of weights: arrays, parameter trees, DLPack views, GGUF files."""
