"""The seam between a learner and a rollout engine. Import `bridges.api` for the contracts; adapters load
lazily."""
