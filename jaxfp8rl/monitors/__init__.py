"""Where a run's numbers go: console, JSONL, TensorBoard, Weights & Biases; and the table and plot at the
end."""
