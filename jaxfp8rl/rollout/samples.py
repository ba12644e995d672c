"""Rows of samples.jsonl: sampled completions, with the log-probabilities of engine and learner by token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from bridges.api import Completion
from jaxfp8rl.data.packing import Sample, microbatches_needed, unpack
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.distributed.mesh import ALL, ONE, ROWS, TENSOR, MeshLayout, fetch
from jaxfp8rl.environments.trajectory import Trajectory, tokens_sampled
from jaxfp8rl.losses.correction import rollout_correction
from jaxfp8rl.losses.logprobs import token_top_k
from jaxfp8rl.microbatch import map_live
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import forward_with_aux, head_weight
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout.context import RolloutContext
from jaxfp8rl.rollout.own_rows import pack_own
from jaxfp8rl.rollout.scored_groups import Group, Rollouts, samples_of
from jaxfp8rl.types import Params, TrainBatch

DIGITS = 4  # decimals of log-probabilities and weights: a third of the bytes, and ratios are known to 1e-4


def sample_rows(
    ctx: RolloutContext, batch: Rollouts, step: int, samples: Sequence[Sequence[Sample]],
    packed: Sequence[TrainBatch], scored: Sequence,
    likeliest: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> list[dict[str, Any]]:
    """The rows of the completions that `kept` chooses.

    A completion that was learned from has `old_logp` and `weights`, the correction's weight of each token, 0
    for a rejected token. Without a scoring pass (loss.old_policy) both are missing, because only the update
    computes them. `likeliest`: the result of `top_tokens` for these completions, written as `top_ids` and
    `top_logp` [tokens, k].
    """
    chosen = kept(batch.groups, ctx.cfg.run.samples_per_step)
    learned = {}
    if chosen and ctx.cfg.loss.old_policy == "recomputed":
        for members, rows, (old, _) in zip(samples, packed, scored):
            facts = fetch((old, _weights(old, rows, ctx.cfg.correction.resolve())))
            learned |= {id(s.completion): pair
                        for s, *pair in zip(members, *(unpack(x, members, ctx.cfg.train.shared_prefix)
                                                       for x in facts))}
    if batch.hollow:  # the first process writes them
        return []
    rows = [_row(g, i, step, ctx.tokenizer, _learned(learned, g.completions[i])) for g, i in chosen]
    return [row | {"top_ids": ids.tolist(), "top_logp": _rounded(logp)}
            for row, (ids, logp) in zip(rows, likeliest)] or rows


def kept(groups: Sequence[Group], count: int) -> list[tuple[Group, int]]:
    """Choose `count` completions of a step, as (group, index in it): the first completion of each of the
    first groups. Two or more include the step's worst and best completions by reward."""
    places = [(g, 0) for g in range(min(count, len(groups)))]
    reward = lambda place: groups[place[0]].rewards[place[1]]
    scored = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rewards))
              if not np.isnan(reward((g, i)))]
    if count < 2 or not scored:
        return [(groups[g], i) for g, i in places]
    ends = {reward(end): end for end in (min(scored, key=reward), max(scored, key=reward))}
    ends = {next((p for p in places if reward(p) == r), end) for r, end in ends.items()}
    rest = [p for p in places if p[0] not in {g for g, _ in ends}]
    return [(groups[g], i) for g, i in sorted([*ends, *rest[: count - len(ends)]])]


def make_top_k(model: ModelConfig, precision: Precision, temperature: float, k: int,
               layout: MeshLayout = ONE) -> Callable:
    """Jitted top_k(policy, batch) -> the k likeliest tokens at the position of each sampled token.

    Returns their ids [M, R, T, k] int32 and log-probabilities [M, R, T, k] float32, both 0 where the response
    mask is false.
    """

    def of_micro(policy: Params, batch: TrainBatch) -> tuple[Array, Array]:
        fields = batch.tokens, batch.positions, batch.segment_ids
        hidden = forward_with_aux(policy, model, *fields, precision, layout=layout, routes=batch.routes,
                                  ends_BT=batch.ends)[0]
        head, axis = layout.gather(head_weight(policy, model)), TENSOR if layout.tensor > 1 else None
        return token_top_k(hidden, head, batch.response_mask, k, temperature,
                           precision.rounding.logits_dtype, axis, model.final_logit_softcapping)

    @rounding_exact_jit
    def top_k(policy: Params, batch: TrainBatch) -> tuple[Array, Array]:
        of_rows = lambda policy, batch, live: map_live(functools.partial(of_micro, policy), batch, live)
        run = layout.run(of_rows, (layout.specs(policy), ROWS, ALL), (ROWS, ROWS))
        return run(policy, batch, batch.response_mask.any((1, 2)))

    return top_k


def top_tokens(ctx: RolloutContext, policy: Params, batch: Rollouts) -> list[tuple[np.ndarray, np.ndarray]]:
    """The policy's likeliest tokens [tokens, k] and their log-probabilities, for each completion that
    `sample_rows` keeps; [] if run.samples_top_k = 0. `policy`: the one that the step scores with."""
    if ctx.top_k is None:
        return []
    first = [(g.prompt, g.completions[i]) for g, i in kept(batch.groups, ctx.cfg.run.samples_per_step)]
    parts = [samples_of(prompt, c) for prompt, c in first]
    samples = sum(parts, [])
    t = ctx.cfg.train
    needed = microbatches_needed(max(len(samples), ctx.cfg.run.samples_per_step), ctx.cfg.max_model_len,
                                 t.row_tokens,
                                 t.rows_per_microbatch)
    packed = pack_own(ctx.group, ctx.layout, ctx.with_routes(samples), t.row_tokens, t.rows_per_microbatch,
                      needed, like=ctx.no_routes)
    found = [iter(unpack(x, samples)) for x in fetch(ctx.top_k(policy, packed))]
    none = np.zeros((0, ctx.cfg.run.samples_top_k), np.int32)  # of a trajectory without a turn
    whole = lambda values, part: np.concatenate([next(values) for _ in part] or [none])
    return [(whole(found[0], part), whole(found[1], part)) for part in parts]


@functools.partial(jax.jit, static_argnames="correction")
def _weights(old_logp, rows: TrainBatch, correction):
    """The correction's weights [M, R, T]; the update computes the same weights again."""
    return rollout_correction(old_logp, rows.rollout_logp, rows.response_mask, correction,
                              rows.segment_ids).weights


def _learned(learned: dict[int, list[np.ndarray]], c: Completion) -> list[np.ndarray] | None:
    """What was learned about each token of a completion, or of a trajectory's branches; None if it was left
    out."""
    parts = c.branches if isinstance(c, Trajectory) else (c,)
    found = [learned.get(id(part.token_ids)) for part in parts]
    return [np.concatenate(x) for x in zip(*found)] if found and all(found) else None


def _row(group: Group, i: int, step: int, tokenizer: Tokenizer,
         learned: Sequence[np.ndarray] | None) -> dict[str, Any]:
    c, problem = group.completions[i], group.prompt.problem
    row = {
        "step": step, "id": problem.id, "prompt": problem.prompt, "completion": group.texts[i],
        "answer": problem.answer,
        "reward": float(group.rewards[i]), "tokens": tokens_sampled(c), "finish_reason": c.finish_reason,
        "token_lengths": token_lengths(tokenizer, c.token_ids, group.texts[i]),
        "rollout_logp": _rounded(c.logprobs),
    }
    if group.named:
        row["rewards"] = {name: None if np.isnan(x[0]) else float(x[0]) for name, x in group.named.items()}
    if isinstance(c, Trajectory):
        row |= {"turns": [[*place, reward] for place, reward in zip(c.turns, c.rewards)], "end": c.end}
    return row | dict(zip(("old_logp", "weights"), map(_rounded, learned))) if learned else row


def token_lengths(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, text: str) -> list[int]:
    """The number of characters of `text` for each token of `ids` [T].

    A token that ends within a character has 0, and the next token has the whole character. The stop token has
    0, since it is not part of the text.
    """
    pieces = [_piece(tokenizer, int(i)) for i in ids]
    for parts in (pieces, [*pieces[:-1], ""]):  # cut off at the limit, or ended by a stop token
        if "".join(parts) == text:
            return list(map(len, parts))
    return _in_context(tokenizer, ids, text)


@functools.lru_cache(maxsize=2**18)
def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _in_context(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, text: str) -> list[int]:
    """`token_lengths` for tokens that split characters or whose text depends on the token before; slower."""
    lengths, left = [], len(text)
    start = done = 0  # the text up to token `done` is known; tokens from `start` on are decoded together
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    for end in range(1, len(ids) + 1):
        known, now = decode(ids[start:done]), decode(ids[start:end])
        whole = len(now) > len(known) and not now.endswith("\ufffd")
        lengths.append(min(len(now) - len(known), left) if whole else 0)
        if whole:
            start, done, left = done, end, left - lengths[-1]
    lengths[-1] += left  # a text that ends within a character, or with U+FFFD itself
    return lengths


def _rounded(values: Any) -> list[float]:
    return np.round(np.asarray(values, np.float64), DIGITS).tolist()
