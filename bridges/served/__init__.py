"""Engines in other processes: stock `vllm serve`, its client, and publishes to it."""
