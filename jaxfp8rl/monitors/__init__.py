"""Outputs of a run's metrics: console, JSONL, TensorBoard, Weights & Biases, and the final table and plot."""
