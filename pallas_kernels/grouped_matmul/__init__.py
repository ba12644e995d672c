"""Products of blockwise-quantised FP8 operands whose rows are grouped by expert."""
