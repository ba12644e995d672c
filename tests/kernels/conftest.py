"""The GPU simulator keeps a thread of JAX's CPU client for each simulated thread that waits at a barrier. Where the client has
fewer, two on a machine of two cores, a simulated kernel can wait for ever: seen once in a dozen runs of one."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_NPROC", "16")  # read when the client is made, at the first array
