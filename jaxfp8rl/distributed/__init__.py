"""A learner on several devices or in several processes: the mesh and the process group."""
