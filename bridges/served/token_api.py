"""A GenRequest as the body of vLLM's `POST /inference/v1/generate`, and its answer as a Completion. One HTTP
request a completion.

An answer is believed in nothing: an answer that is not one of vLLM's raises `BadAnswer`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
from typing import Any

import numpy as np

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineFormats,
    FinishReason,
    GenRequest,
    VersionSpan,
    supports,
)
from bridges.inside_vllm.sampling import likeliest
from bridges.served.http_calls import BadAnswer

PATH = "/inference/v1/generate"
HOME = "/jaxfp8rl"  # of the plugin: what an engine is
MOST_TOKENS = 32  # of an event of a stream
NOTHING = -9999.0  # vLLM writes it for NaN, for -inf, and for a token without a log-probability


def body(r: GenRequest, seed: int | None, vocab_size: int, streams: bool = False) -> dict[str, Any]:
    """The JSON of one completion of `r`. `streams`: its tokens come as events, of some tokens each."""
    s = r.sampling
    sampling = {
        "max_tokens": s.max_tokens, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p,
        "seed": seed, "stop_token_ids": [int(t) for t in s.stop_token_ids], "ignore_eos": True,
        "detokenize": False, "logprobs": likeliest(s, vocab_size),
    }
    said = {"token_ids": [int(t) for t in r.prompt_token_ids], "sampling_params": sampling}
    if streams:
        sampling["stream_interval"] = min(max(s.max_tokens // 64, 1), MOST_TOKENS)
    return said | ({"stream": True} if streams else {})


def rest(r: GenRequest, begun: Completion) -> GenRequest:
    """The request for what is left of a completion that has `begun`."""
    tokens = begun.token_ids.tolist()
    sampling = dataclasses.replace(r.sampling, max_tokens=r.sampling.max_tokens - len(tokens))
    return dataclasses.replace(r, prompt_token_ids=(*r.prompt_token_ids, *tokens), sampling=sampling)


def completion(r: GenRequest, index: int, answer: Any, vocab_size: int, routed: bool) -> Completion:
    """Completion `index` of `r`, from the parsed answer.

    A log-probability that vLLM could not tell becomes NaN, so that `Completion.problem` names it. Raises
    BadAnswer; EngineDirty if a token was sampled from weights that nobody has published.
    """
    try:
        return _completion(r, index, answer, vocab_size, routed)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, RecursionError,
            EOFError, MemoryError, binascii.Error) as e:
        raise BadAnswer(f"request {r.request_id!r}: the answer is not one of vLLM's ({type(e).__name__}: "
                        f"{str(e)[:200]})", "is it a vLLM of this project's versions at that address?") from e


def _completion(r: GenRequest, index: int, answer: Any, vocab_size: int, routed: bool) -> Completion:
    [choice] = answer["choices"]
    tokens = _tokens(choice["token_ids"], r.sampling.max_tokens, vocab_size)
    rows = choice["logprobs"]["content"]
    if [row["token_id"] for row in rows] != tokens.tolist():
        raise ValueError(f"{len(tokens)} tokens with log-probabilities of {len(rows)} others")
    logprobs = np.array([_number(row["logprob"]) for row in rows], np.float32)
    among: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if width := likeliest(r.sampling, vocab_size):
        among = supports(_left(rows, width, vocab_size), r.sampling.reported)
    said, inputs = choice["finish_reason"], len(r.prompt_token_ids) + len(tokens) - 1
    reason: FinishReason = said if said in ("stop", "length") else "abort"
    experts = _experts(choice["routed_experts"], inputs) if routed else None
    spans = _spans(choice["weight_versions"], len(tokens))
    return Completion(r.request_id, index, tokens, logprobs, reason, spans, experts, *among, _cached(answer))


def _cached(answer: Any) -> int | None:
    """The tokens of the prompt that were found in the cache; None from a server without
    `--enable-prompt-tokens-details`, or in a stream."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {"cached_tokens": None}
    if (found := details["cached_tokens"]) is not None and (type(found) is not int or found < 0):
        raise ValueError(f"cached_tokens: {found!r}")
    return found


def _tokens(ids: Any, most: int, vocab_size: int) -> np.ndarray:
    """[T] int32."""
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < vocab_size for t in ids):
        raise ValueError("its token_ids are not tokens of the vocabulary")
    if len(ids) > most:
        raise ValueError(f"{len(ids)} tokens, and {most} were asked for")
    return np.array(ids, np.int32)


def _number(x: Any) -> float:
    if type(x) not in (int, float):
        raise TypeError(f"a log-probability of {type(x).__name__}")
    return float("nan") if x == NOTHING else float(x)


def _left(rows: list[Any], width: int, vocab_size: int) -> np.ndarray:
    """[T, width] token ids that the filters left, -1 for none."""
    left = np.full((len(rows), width), -1, np.int64)
    for i, row in enumerate(rows):
        kept = [t["token_id"] for t in row["top_logprobs"] if not np.isnan(_number(t["logprob"]))][:width]
        left[i, : len(kept)] = _tokens(kept, width, vocab_size)
    return left.astype(np.int32)


def _spans(versions: Any, tokens: int) -> tuple[VersionSpan, ...]:
    """The spans, which cover the completion from end to end."""
    if versions is None and not tokens:
        return ()
    spans = []
    for said in versions or ():
        if not str(said["version"]).isdecimal():
            raise EngineDirty(f"tokens were sampled from the weights {str(said['version'])[:40]!r}, which no "
                              "learner has published", "publish a full set of weights first")
        spans.append(VersionSpan(said["start"], said["end"], int(said["version"])))
    ends = [0, *(s.stop for s in spans)]
    if [s.start for s in spans] != ends[:-1] or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(f"its weight_versions do not cover {tokens} tokens")
    return tuple(s for s in spans if s.stop > s.start)


def _experts(encoded: str, rows: int) -> np.ndarray:
    """[rows, L, k] unsigned."""
    array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    if array.dtype.kind not in "iu" or array.ndim != 3 or len(array) != rows:
        raise ValueError(f"routed_experts {array.dtype} {array.shape}, and {rows} tokens were inputs")
    return array


def capabilities(said: Any) -> Capabilities:
    """What the first rank says (`bridges.vllm_plugin`). Raises BadAnswer for what is no engine's."""
    try:
        rank = said["ranks"][0]
        if rank["formats"] is None:
            raise BridgeError(f"the number formats of the engine are not known: {rank['formats_problem']}",
                              "start it with other settings of vLLM; docs/vllm_server.md has those that ran")
        return Capabilities("vllm", str(rank["engine_version"]), EngineFormats(**rank["formats"]),
                            int(rank["max_model_len"]), int(rank["vocab_size"]), seeds=True,
                            routed_experts=bool(rank["routed_experts"]), support=True)
    except (TypeError, KeyError, IndexError, ValueError) as e:
        raise BadAnswer(f"{HOME}: not what an engine says of itself: {str(said)[:200]}",
                        "install one version of this project on both sides") from e
