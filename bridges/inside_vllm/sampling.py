"""Requests as vLLM takes them, in this process or by HTTP: their limits, their seeds, their parameters. vLLM
is imported for the last alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridges.api import Capabilities, GenRequest, SamplingParams

# vLLM silently raises a temperature below the first, and refuses one above the second
COOLEST, HOTTEST = 0.01, 2.0


def check(r: GenRequest, can: Capabilities) -> None:
    """Raise ValueError if a vLLM that can do what `can` says cannot answer `r`."""
    can.check(r)
    if r.sampling.temperature and not COOLEST <= r.sampling.temperature <= HOTTEST:
        raise ValueError(f"request {r.request_id!r}: vLLM samples at temperature 0 or {COOLEST} to "
                         f"{HOTTEST}, not {r.sampling.temperature}")


def likeliest(s: SamplingParams, vocab_size: int) -> int:
    """The number of likeliest tokens to request, from which the support of a draw follows. The filters set
    all others to -inf."""
    return min(s.reported + 1, vocab_size) if s.reported else 0


def seed_of(r: GenRequest, index: int, start: int = 0) -> int | None:
    """The seed of a completion from its token `start` on: distinct within the request and independent of
    those of similar seeds."""
    if r.seed is None:
        return None
    sequence = np.random.SeedSequence([r.seed, index, start] if start else [r.seed, index])
    return int(sequence.generate_state(1)[0])


def sampling_params(s: SamplingParams, seed: int | None, likeliest: int = 0) -> Any:
    """`s` as vLLM's SamplingParams: each position reports the sampled token and the `likeliest` ones. vLLM
    gives out a completion that is done; a step makes nothing for the others."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        max_tokens=s.max_tokens, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=seed,
        stop_token_ids=list(s.stop_token_ids), ignore_eos=True, detokenize=False, flat_logprobs=True,
        logprobs=likeliest, output_kind=RequestOutputKind.FINAL_ONLY,
    )
