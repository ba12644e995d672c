"""Our sampling parameters as vLLM's, and the seed of each completion."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridges.api import GenRequest, SamplingParams


def seed_of(r: GenRequest, index: int, start: int = 0) -> int | None:
    """The seed of a completion from its token `start` on: distinct within the request and independent of
    those of similar seeds."""
    if r.seed is None:
        return None
    sequence = np.random.SeedSequence([r.seed, index, start] if start else [r.seed, index])
    return int(sequence.generate_state(1)[0])


def sampling_params(s: SamplingParams, seed: int | None, likeliest: int = 0) -> Any:
    """`s` as vLLM's SamplingParams: each position reports the sampled token and the `likeliest` ones."""
    import vllm

    return vllm.SamplingParams(
        max_tokens=s.max_tokens, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=seed,
        stop_token_ids=list(s.stop_token_ids), ignore_eos=True, detokenize=False, flat_logprobs=True,
        logprobs=likeliest,
    )
