"""Where a run's numbers go: console, JSONL, TensorBoard; and the table and plot at the end."""
