"""How much memory a run needs, whether it fits, and how many operations an update takes."""
