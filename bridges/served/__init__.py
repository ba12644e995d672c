"""Engines in other processes: our own server, wire format and links. Stock `vllm serve` is to replace this
folder."""
