"""The cost of FP8 keys, values and queries at scale 1 and with calibrated scales: one policy's
log-probabilities with and without FP8.

    jaxfp8rl bench kv_scales [--smollm2 models/smollm2-135m] [--seeds 3]

It runs on a CPU with everything else in float32, so that all differences come from the rounding of attention.
The subjects are those of precision_errors.py: a small model with query/key norm after a part of the demo's
warm start, and SmolLM2, which has no such norms, on text. The scales come from another batch than the one
that is scored. The yardstick of each row is scale 1.

Needs no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.precision_errors import Subject, demo, smollm2
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.training.calibrate import KvCalibration

ROUNDED = {"cache": {"kv": KvFormat(fp8=True)},
           "cache, queries and probabilities": {"kv": KvFormat(fp8=True, attention_fp8=True)}}


def main() -> None:
    parser = arguments(__doc__, "kv_scales")
    parser.add_argument("--smollm2", help="HF folder of SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, default=3, help="warm starts of the demo's model")
    args = parser.parse_args()
    subjects = [demo(seed=seed)
                for seed in range(args.seeds)] + ([smollm2(args.smollm2)] if args.smollm2 else [])
    rows, amax = [], {}
    for subject in subjects:
        for what, fields in ROUNDED.items():
            one, calibrated, amax[subject.name] = gaps(subject, fields)
            for metric in one:
                rows.append(row(f"{subject.name}, {what}", metric, "", calibrated[metric], one[metric],
                                "scale 1", True))
        write(args.out, "kv_scales", rows, args.plot, amax=amax)


def gaps(subject: Subject, fields: dict) -> tuple[dict, dict, dict]:
    """Differences from the unrounded policy, at scale 1 and with scales calibrated on the batch's first half;
    and the amax."""
    layers = subject.model.num_hidden_layers
    plain, rounded = Precision.uniform(layers), Precision.uniform(layers, **fields)
    policy = policy_of(subject.params, plain)
    half = subject.batch.tokens.shape[1] // 2  # one micro-batch of rows
    seen, scored = (jax.tree.map(lambda x, s=s: x[:, s], subject.batch)
                    for s in (slice(0, half), slice(half, None)))
    exact, kv = (KvCalibration(subject.model, p, 1.0, 0.9) for p in (plain, rounded))
    want, mask = np.asarray(exact.score(policy, scored)), np.asarray(scored.response_mask)

    def off(policy) -> dict[str, float]:
        d = (np.asarray(kv.score(policy, scored)) - want)[mask].astype(np.float64)
        return {"abs_logp_diff": float(np.abs(d).mean()), "k3": float((np.expm1(d) - d).mean())}

    kv.score(policy, seen)
    scaled, amax = kv.apply(policy), {n: [float(a) for a in x] for n, x in kv.amax.items()}
    return off(policy), off(scaled), amax


if __name__ == "__main__":
    main()
