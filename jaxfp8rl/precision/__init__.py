"""Which product runs in which format: the recipes, and the quantised product with its derivative."""
