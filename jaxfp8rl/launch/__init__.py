"""`jaxfp8rl launch`: start learners and engines of a run, on this host, by Ray, or by Slurm."""
