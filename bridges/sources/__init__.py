"""Where weights come from: arrays, DLPack views, GGUF files."""
