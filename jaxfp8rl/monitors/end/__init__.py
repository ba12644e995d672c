"""How a run ends: the summary, the plot, its best and worst completions, its evaluations."""
