"""Probes of FP8 rounding errors and of numbers that are not finite, by layer and linear."""
