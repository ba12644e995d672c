"""Numbers that quantisers find hard, for those of vLLM on either machine."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def hard_cases(shape: tuple[int, int]) -> np.ndarray:
    """Groups of magnitudes 1e-30 to 1e30, of everyday ones, of zeros, of subnormals, and all ties between
    E4M3 codes, float32."""
    rng = np.random.default_rng(0)
    groups = 10.0 ** rng.uniform(-30, 30, (shape[0], -(-shape[1] // 128)))
    groups[:1000] = np.exp2(rng.uniform(-12, 12, (1000, groups.shape[1])))
    groups[1000:1100] = 1e-39
    groups[1100:1200, ::2] = 0
    x = rng.normal(size=shape).astype(np.float32)
    x *= np.repeat(groups, 128, 1)[:, : shape[1]].astype(np.float32)
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x[1200:1300, :128] = np.append(codes[:-1] + codes[1:],
                                   [896.0, -896.0]) * np.exp2(np.arange(-50, 50))[:, None]
    return x
