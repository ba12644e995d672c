"""One torch thread: the models are tiny, and two thread pools on two cores wait for each other. Before torch is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
