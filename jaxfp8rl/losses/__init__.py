"""Pure functions on arrays: log-probabilities, advantages, the rollout correction and the objectives."""
