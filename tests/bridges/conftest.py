"""One torch thread: the models are tiny, and two thread pools on two cores wait for each other. Before torch is imported."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from remote_servers import own, remote, served  # noqa: E402, F401  fixtures
