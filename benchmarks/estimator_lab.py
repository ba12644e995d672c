"""The estimator laboratory: bias, variance and effective sample size of every correction, where the exact
gradient is known.

    jaxfp8rl bench estimator_lab [--plots docs]    # about four minutes, CPU

The world. A policy writes T tokens of an alphabet of V; the logits of the next token depend on the last one,
theta [V, V]. The reward comes at the end: 1 if token 0, the right one, was written more than `threshold`
times, otherwise 0, so that early tokens matter as much as late ones. The engine's policy mu has the logits
theta + noise [T, V, V]. The target is the gradient of the expected reward at theta, which is pi_old.

The code under test is the training code: `rollout_correction`, `token_scale` and `policy_loss`, on samples of
mu, combined as in the train step (ratio pi/pi_old = 1; the advantage is the reward minus its mean under mu,
like that of a large group).

Exact results. The pair (tokens right so far, last token) is a Markov chain. For every estimator whose weight
is a function of the token alone, dynamic programming therefore gives the value, its gradient, and the
estimator's mean and second moment at any length, with the weights that `rollout_correction` gives to a table
of all tokens.
The same holds for plain sequence importance sampling, whose weight is a product. So has a product over a
turn of several. Corrections that look at a whole sequence or batch are simulated; "none", whose mean is
known exactly, is their control variate on the same samples. For short sequences `enumerated` is exact for
every correction that does not look at a batch. All results are relative to the norm of the true gradient.

Needs no GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.estimator_plots import SEQUENCES, mean_squared_error, plot
from benchmarks.estimator_world import (
    World,
    make_world,
    mismatch_of,
    path_moments,
    scores,
    true_gradient,
)
from jaxfp8rl.losses.aggregation import token_scale
from jaxfp8rl.losses.correction import CorrectionConfig, rollout_correction
from jaxfp8rl.losses.objectives import ObjectiveConfig, policy_loss
from jaxfp8rl.losses.presets import PRESETS, get_preset

DOCS = Path(__file__).parent.parent / "docs"
# sequences per batch; simulated tokens; engines to average over
BATCH, TOKENS, DRAWS = 128, 2**22, 3
LENGTHS, LENGTH = (4, 16, 64, 256, 1024), 256
# the error of a logit in nats; 0.1 gives a token_mult_prob_error of 1.05
SIZES, SIZE = (0.025, 0.05, 0.1, 0.2, 0.4), 0.1
NOISES = ("fresh", "shared", "outliers")
COMPARED = ("none", "token_tis", "ais", "nemo/gspo", "sequence_tis", "sequence_mis", "geometric_mask")
BARS = ("none", "nemo/is", "token_tis", "icepop", "sequence_tis", "geometric_mask")
MASKS = ("geometric_mask", "verl/decoupled_geo_rs", "vexact", "verl/decoupled_seq_is_rs")


class Estimate(NamedTuple):
    """An estimator of the gradient: its mean [D]; its variance (trace of the covariance) per sequence; the
    standard error of the mean, 0 if it is exact; the effective share of the sampled tokens, (sum w)^2 / (N
    sum w^2)."""

    mean: np.ndarray
    variance: float
    error: float = 0.0
    share: float = math.nan


def exact_estimate(world: World, config: CorrectionConfig) -> Estimate:
    """The exact estimate for a weight that is a function of the token alone, or for the plain product over
    the sequence."""
    advantage = world.rewards - world.baseline
    log_pi, log_mu = world.log_pi, world.log_mu
    if config == PLAIN_SEQUENCE:  # E_mu[w f] = E_pi[f], and E_mu[w^2 f] is a sum over pi^2 / mu
        squared = np.exp(2 * log_pi - log_mu)
        mean = path_moments(np.exp(log_pi), scores(world))[1].sum(-1) @ advantage
        second = path_moments(squared, scores(world))[2].sum(-1) @ advantage**2
        return Estimate(mean, float(second.sum() - mean @ mean), share=1 / path_moments(squared)[0].sum())
    if config == PLAIN_TURN:
        return _turn_estimate(world)
    weights = np.asarray(_table_weights(log_pi.astype(np.float32), log_mu.astype(np.float32), config), float)
    weights = np.where(world.sampled[:, None, None], weights, 0.0)
    _, first, second = path_moments(np.exp(log_mu), weights[:, None] * scores(world))
    mean, second = first.sum(-1) @ advantage, second.sum(-1) @ advantage**2
    total, squares = path_moments(np.exp(log_mu),
                                  np.stack([weights, weights**2], 1))[1].sum((-1, -2)) / world.sampled.sum()
    return Estimate(mean, float(second.sum() - mean @ mean), share=total**2 / squares)


def _turn_estimate(world: World) -> Estimate:
    """Weights that are products over a turn: E_mu[sum_k W_k S_k A] of the turns k, each by a kernel that is
    pi's in turn k and mu's elsewhere. 2 E[W_j W_k S_j S_k] is E[(S_j + S_k)^2] less the squares, under pi in
    both."""
    advantage, turn = world.rewards - world.baseline, np.isin(np.arange(world.length), world.turns).cumsum()
    pi, mu = np.exp(world.log_pi), np.exp(world.log_mu)
    of = [(turn == k)[:, None, None] for k in range(turn[-1] + 1)]
    steps = [np.where(here[..., None], scores(world), 0.0) for here in of]
    mean = sum(path_moments(np.where(here, pi, mu), s)[1].sum(-1) @ advantage for here, s in zip(of, steps))
    squares = [path_moments(np.where(here, pi**2 / mu, mu), s)[2].sum(-1) @ advantage**2
               for here, s in zip(of, steps)]
    total = sum(x.sum() for x in squares)
    for (a, s), (b, r) in itertools.combinations(list(zip(of, steps)), 2):
        kernel = np.where(a | b, pi, mu)
        pair, alone, other = (path_moments(kernel, x)[2].sum(-1) @ advantage**2 for x in (s + r, s, r))
        total += (pair - alone - other).sum()
    tokens = [(here[:, 0, 0] & world.sampled).sum() for here in of]
    second = [path_moments(np.where(here, pi**2 / mu, mu))[0].sum() for here in of]
    return Estimate(mean, float(total - mean @ mean), share=sum(tokens) / float(np.dot(tokens, second)))


@functools.partial(jax.jit, static_argnums=2)
def _table_weights(log_pi, log_mu, config):
    if not token_local(config):
        raise ValueError(f"a token's weight depends on other tokens: {config}")
    return rollout_correction(log_pi, log_mu, jnp.ones(log_pi.shape, bool), config).weights


PLAIN_SEQUENCE = get_preset("nemo/gspo")  # the product over the sequence, neither truncated nor rejected
PLAIN_TURN = PLAIN_SEQUENCE._replace(by_turn=True)


def token_local(config: CorrectionConfig) -> bool:
    return not (config.needs_segments or config.needs_batch)


# The shipped code on sequences
# ---------------------------------------------------------------------------------------


def batch_gradient(theta, ids, tokens, rollout_logp, advantages, config):
    """ids, tokens, rollout_logp [B, T], advantages [B] -> (the ascent direction [V * V] of a train step, the
    effective share)."""
    last = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    mask = (ids > 0) & (rollout_logp != 0)  # which an environment's tokens have
    learner = lambda theta: jax.nn.log_softmax(theta)[last, tokens]
    old_logp = learner(theta)
    fix = rollout_correction(old_logp, rollout_logp, mask, config, ids)
    scale = token_scale(fix.mask, ids, "seq_mean_token_sum")
    advantages = jnp.broadcast_to(advantages[:, None], tokens.shape)

    def loss(theta):
        policy, _ = policy_loss(learner(theta), old_logp, advantages, fix.mask, ids,
                                ObjectiveConfig("ppo_clip"))
        return jnp.sum(jnp.where(fix.weights != 0, scale * fix.weights * policy, 0.0))

    share = fix.metrics["correction/ess"] * (1 - fix.metrics["correction/rejected_fraction"])
    return -jax.grad(loss)(theta).ravel(), share


@functools.partial(jax.jit, static_argnames="config")
def batch_gradients(theta, ids, tokens, rollout_logp, advantages, config):
    """`batch_gradient` of each of K batches: [K, V * V], [K]."""
    return jax.lax.map(lambda x: batch_gradient(theta, ids, *x, config), (tokens, rollout_logp, advantages))


class Samples(NamedTuple):
    """theta [V, V]; segment_ids [B, T], all 1; tokens, rollout_logp [K, B, T]; advantages [K, B]."""

    theta: jax.Array
    segment_ids: jax.Array
    tokens: jax.Array
    rollout_logp: jax.Array
    advantages: jax.Array


def describe(world: World, tokens: np.ndarray) -> Samples:
    """The learner's view of tokens [K, B, T]."""
    last = np.pad(tokens[..., :-1], ((0, 0), (0, 0), (1, 0)))
    rollout_logp = np.where(world.sampled, world.log_mu[np.arange(world.length), last, tokens], 0.0)
    advantages = world.rewards[(tokens == 0).sum(-1)] - world.baseline
    arrays = (world.theta, np.ones_like(tokens[0]), tokens, rollout_logp, advantages)
    return Samples(*(jnp.asarray(x, d) for x, d in zip(arrays, "fiiff")))


def sample(world: World, batches: int, size: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    cumulative = np.exp(world.log_mu).cumsum(-1)[..., :-1]
    tokens, last = np.zeros((batches, size, world.length), np.int32), np.zeros((batches, size), np.int32)
    for t in range(world.length):
        last = (rng.random((batches, size, 1)) > cumulative[t, last]).sum(-1)
        tokens[..., t] = last
    return describe(world, tokens)


def enumerated(world: World, config: CorrectionConfig) -> Estimate:
    """The exact estimate, with each of the V^T sequences as its own batch, for corrections that do not look
    at a batch."""
    v = len(world.theta)
    tokens = np.stack(np.unravel_index(np.arange(v**world.length), (v,) * world.length), -1)[:, None]
    samples = describe(world, tokens.astype(np.int32))
    last = np.pad(tokens[..., :-1], ((0, 0), (0, 0), (1, 0)))
    chance = np.exp(world.log_mu[np.arange(world.length), last, tokens].sum(-1))[:, 0]
    gradients = np.asarray(batch_gradients(*samples, config)[0], float)
    mean = chance @ gradients
    return Estimate(mean, float(chance @ (gradients**2).sum(-1) - mean @ mean))


def simulated(samples: Samples, config: CorrectionConfig, control: tuple[np.ndarray, np.ndarray]) -> Estimate:
    """The estimate from K batches. control: the gradients [K, D] of an estimator on the same samples and its
    known mean [D]; the noise that it explains is removed from the mean."""
    x, share = batch_gradients(*samples, config)
    x, (z, known) = np.asarray(x, float), control
    batches, size = samples.tokens.shape[:2]
    dx, dz = x - x.mean(0), z - z.mean(0)
    beta = (dx * dz).sum() / (dz * dz).sum()
    rest = ((dx - beta * dz) ** 2).sum() / (batches - 1)
    mean = x.mean(0) - beta * (z.mean(0) - known)
    return Estimate(mean, size * (dx**2).sum() / (batches - 1), math.sqrt(rest / batches),
                    float(share.mean()))


# The experiments
# -----------------------------------------------------------------------------------------------------


def measure(names: Sequence[str], length: int, size: float, kind: str = "shared") -> list[dict]:
    """One record per preset, averaged over DRAWS engines."""
    worlds, facts = _engines(length, size, kind)
    found = {name: [] for name in names}
    for seed, world in enumerate(worlds):
        samples = control = None
        for name in names:
            config = get_preset(name)
            if token_local(config) or config == PLAIN_SEQUENCE:
                found[name].append(exact_estimate(world, config))
                continue
            if samples is None:
                samples = sample(world, max(32, min(256, TOKENS // (BATCH * length))), BATCH, seed)
                plain = np.asarray(batch_gradients(*samples, get_preset("none"))[0], float)
                control = plain, exact_estimate(world, get_preset("none")).mean
            found[name].append(simulated(samples, config, control))
    return [{"preset": name, "length": length, "size": size, "noise": kind, **_summary(e, facts)}
            for name, e in found.items()]


def _engines(length: int, size: float, kind: str) -> tuple[list[World], list[tuple]]:
    worlds = [make_world(length, size, kind, seed) for seed in range(1, DRAWS + 1)]
    return worlds, [(true_gradient(w), mismatch_of(w)) for w in worlds]


def _relative(e: Estimate, truth: np.ndarray) -> tuple:
    """Squared errors minus the contribution of a simulated mean's noise."""
    norm, noise = np.linalg.norm(truth), e.error**2
    along = e.mean @ truth / norm
    squared_bias = (e.mean - truth) @ (e.mean - truth) - noise
    across = max(e.mean @ e.mean - along**2 - noise * (1 - 1 / len(truth)), 0.0)
    angle = math.atan2(math.sqrt(across), along) if along else math.nan
    return squared_bias / norm**2, noise / norm**2, e.variance / norm**2, angle**2, e.share, norm


def _summary(estimates: list[Estimate], facts: list[tuple]) -> dict:
    """Bias and angle as root mean square over engines, everything else as mean."""
    values = np.array([(*_relative(e, truth), mismatch) for e, (truth, mismatch) in zip(estimates, facts)])
    bias, error, variance, angle, share, norm, mismatch = values.mean(0).tolist()
    return {
        "mismatch": mismatch, "bias": math.sqrt(max(bias, 0.0)), "bias_error": math.sqrt(error / len(facts)),
        "angle_degrees": math.degrees(math.sqrt(angle)) if angle == angle else None,  # None: all rejected
        "variance": variance, "effective_share": share if share == share else None, "gradient_norm": norm,
    }


def of_turns(length: int, size: float) -> list[dict]:
    """Records of a conversation of two turns of equal length, with an environment's token between them."""
    worlds = [in_two_turns(make_world(length, size, "shared", seed)) for seed in range(1, DRAWS + 1)]
    facts = [(true_gradient(w), mismatch_of(w)) for w in worlds]
    configs = {"none": get_preset("none"), "token": get_preset("nemo/is"), "turn": PLAIN_TURN,
               "trajectory": PLAIN_SEQUENCE}
    return [{"weight": name, "length": length, "size": size, "noise": "shared",
             **_summary([exact_estimate(w, config) for w in worlds], facts)}
            for name, config in configs.items()]


def in_two_turns(world: World) -> World:
    return world._replace(turns=(world.length // 2 + 1,))


def kept_share(name: str, length: int, size: float) -> float:
    """The share of sampled tokens that a preset's rejections keep."""
    kept = []
    for seed in range(1, DRAWS + 1):
        samples = sample(make_world(length, size, "shared", seed), 1, max(64, 2**18 // length), seed)
        logp = jax.nn.log_softmax(samples.theta)[jnp.pad(samples.tokens[0, :, :-1], ((0, 0), (1, 0))),
                                                 samples.tokens[0]]
        kept.append(float(_mask(logp, samples.rollout_logp[0], samples.segment_ids, get_preset(name)).mean()))
    return float(np.mean(kept))


@functools.partial(jax.jit, static_argnums=3)
def _mask(logp, rollout_logp, ids, config):
    return rollout_correction(logp, rollout_logp, ids > 0, config._replace(denominator="kept"), ids).mask


def experiments() -> dict[str, list[dict]]:
    """Every record of the result file."""
    found = {}
    found["length"] = [r for n in LENGTHS for r in measure(COMPARED, n, SIZE)]
    found["length, fresh noise"] = [r for n in LENGTHS
                                    for r in measure(("none", "token_tis", "nemo/gspo"), n, SIZE, "fresh")]
    found["mismatch"] = [r for size in SIZES for r in measure(COMPARED, LENGTH, size)]
    found["noise"] = [r for kind in NOISES for r in measure(BARS, LENGTH, SIZE, kind)]
    found["kept"] = [
        {"preset": name, "length": n, "size": size, "kept": kept_share(name, n, size)}
        for name in MASKS for size in (SIZE / 2, SIZE) for n in LENGTHS
    ]
    found["presets"] = _every_preset(length=64, size=2 * SIZE)
    found["enumerated"] = _enumerated(length=6, size=3 * SIZE)
    found["turns"] = [r for n in LENGTHS for r in of_turns(n, SIZE)]
    return found


def _every_preset(length: int, size: float) -> list[dict]:
    names = {}
    for name, config in PRESETS.items():
        names.setdefault(config._replace(overflow="cap"), []).append(name)  # no weight overflows here
    records = {r["preset"]: r for r in measure([same[0] for same in names.values()], length, size)}
    return [records[same[0]] | {"preset": name} for same in names.values() for name in same]


def _enumerated(length: int, size: float) -> list[dict]:
    """Results from all sequences, without sampling."""
    worlds, facts = _engines(length, size, "shared")
    names = ("none", "token_tis", "icepop", "nemo/gspo", "sequence_tis", "sequence_mis", "geometric_mask")
    found = {name: [enumerated(w, get_preset(name)) for w in worlds] for name in names}
    return [{"preset": n, "length": length, "size": size, "noise": "shared", **_summary(e, facts)}
            for n, e in found.items()]


def rows(found: dict[str, list[dict]]) -> list[dict]:
    """The comparisons of each preset with no correction, and with plain sequence importance sampling."""
    out = []
    for n in (LENGTH, LENGTHS[-1]):
        records = {r["preset"]: r for r in found["length"] if r["length"] == n}
        none, plain = records["none"], records["nemo/gspo"]
        for name, r in records.items():
            case = f"{name}, {n} tokens, mismatch {r['mismatch']:.3f}"
            error = functools.partial(mean_squared_error, sequences=SEQUENCES)
            out += [
                row(case, "relative bias", "of |gradient|", r["bias"], none["bias"], "no correction", True),
                row(case, "variance a sequence", "of |gradient|^2", r["variance"], plain["variance"],
                    "sequence IS", True),
                row(case, f"error of {SEQUENCES} sequences", "of |gradient|^2", error(r), error(none),
                    "no correction", True),
            ]
    return out


def main() -> None:
    parser = arguments(__doc__, "corrections")
    parser.add_argument("--plots", default=DOCS, help="folder for the plots, corrections-*.png")
    args = parser.parse_args()
    found = experiments()
    write(args.out, "corrections", rows(found), args.plot, records=found)
    plot(args.out, args.plots)


if __name__ == "__main__":
    main()
