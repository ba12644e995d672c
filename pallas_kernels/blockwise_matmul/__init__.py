"""Products of blockwise-quantised FP8 operands."""
