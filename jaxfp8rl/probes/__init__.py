"""Where FP8 loses precision: rounding errors by layer, and the layers that cause the mismatch."""
