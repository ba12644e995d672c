"""The world of the estimator laboratory: a policy over four tokens, an engine with errors, and the exact
values of both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

VOCABULARY = 4
# [V, V]: the environment's answer leans to the token after the last
ANSWERS = np.log((np.roll(np.eye(VOCABULARY), 1, 1) * 4 + 1) / (VOCABULARY + 4))


class World(NamedTuple):
    """theta [V, V]: logits of pi_old by last token; noise [T, V, V]: the engine's error in them. The first
    "last token" is 0. turns: the first token of each turn but the first; the token before it is an
    environment's, which answers each last token with the chances of `ANSWERS`, whoever acts."""

    theta: np.ndarray
    noise: np.ndarray
    threshold: int
    turns: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.noise)

    @property
    def sampled(self) -> np.ndarray:
        """[T] bool: the policy's tokens."""
        return ~np.isin(np.arange(self.length) + 1, self.turns)

    @property
    def log_pi(self) -> np.ndarray:
        """[T, V, V] float64."""
        return self._answered(np.broadcast_to(log_softmax(self.theta), self.noise.shape))

    @property
    def log_mu(self) -> np.ndarray:
        return self._answered(log_softmax(self.theta + self.noise))

    def _answered(self, log_policy: np.ndarray) -> np.ndarray:
        return np.where(self.sampled[:, None, None], log_policy, ANSWERS) if self.turns else log_policy

    @property
    def rewards(self) -> np.ndarray:
        """[T + 1]: the reward by the number of right tokens."""
        return (np.arange(self.length + 1) > self.threshold).astype(float)

    @property
    def baseline(self) -> float:
        return float(path_moments(np.exp(self.log_mu))[0].sum(-1) @ self.rewards)


def make_world(length: int, size: float, kind: str = "fresh", seed: int = 0) -> World:
    """A random policy of moderate entropy that is right half of the time, and an engine with logits wrong by
    `size` nats (std).

    kind: "fresh": every position has its own error. "shared": the error of a last token is the same wherever
    it occurs, as rounded weights would make it. "outliers": fresh, and in addition one logit in 200 is wrong
    by 4 nats.
    """
    rng = np.random.default_rng(seed)
    v = VOCABULARY
    theta = np.random.default_rng(0).normal(0, 1.5, (v, v))
    noise = rng.normal(0, size,
                       (1 if kind == "shared" else length, v, v)).repeat(length if kind == "shared" else 1, 0)
    if kind == "outliers":
        noise += 4 * rng.choice([-1, 0, 1], noise.shape, p=[0.0025, 0.995, 0.0025])
    elif kind not in ("fresh", "shared"):
        raise ValueError(f'noise "{kind}" is not one of "fresh", "shared", "outliers"')
    right = path_moments(np.exp(np.broadcast_to(log_softmax(theta), noise.shape)))[0].sum(-1)
    return World(theta, noise, int(np.searchsorted(right.cumsum(), 0.5)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def path_moments(kernel: np.ndarray,
                 steps: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums over all paths x of product_t kernel[t, x_(t-1), x_t] times 1, S(x) and S(x)^2, with S = sum_t
    steps[t, :, x_(t-1), x_t].

    kernel [T, V, V], steps [T, D, V, V] -> [T + 1, V], [D, T + 1, V], [D, T + 1, V] by (right tokens, last
    token).
    """
    v = kernel.shape[-1]
    steps = np.zeros((len(kernel), 0, v, v)) if steps is None else steps
    zeroth = np.eye(v)[:1]  # no right token yet, and the last token is 0
    first = second = np.zeros((steps.shape[1], 1, v))
    for k, c in zip(kernel, steps):
        kc = k * c
        second = _count(second @ k + 2 * first @ kc + zeroth @ (kc * c))
        zeroth, first = _count(zeroth @ k), _count(first @ k + zeroth @ kc)
    return zeroth, first, second


def _count(x: np.ndarray) -> np.ndarray:
    """[..., n, V] -> [..., n + 1, V]: paths that just wrote token 0 move to one more right token."""
    out = np.zeros((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]))
    out[..., 1:, 0], out[..., :-1, 1:] = x[..., 0], x[..., 1:]
    return out


def score(world: World) -> np.ndarray:
    """[V * V, V, V]: d log pi(token | last) / d theta, by component, last token, token."""
    v = len(world.theta)
    pi, eye = np.exp(log_softmax(world.theta)), np.eye(v)
    return (eye[:, None, :, None] * (eye[None, :, None, :] - pi[:, :, None, None])).reshape(v * v, v, v)


def scores(world: World) -> np.ndarray:
    """[T, V * V, V, V]: `score` at the policy's tokens, and 0 at the environment's."""
    return np.where(world.sampled[:, None, None, None], score(world), 0.0)


def true_gradient(world: World) -> np.ndarray:
    """[V * V]: the gradient of the expected reward under pi_old."""
    return path_moments(np.exp(world.log_pi), scores(world))[1].sum(-1) @ world.rewards


def mismatch_of(world: World) -> float:
    """mismatch/token_mult_prob_error in expectation: the mean of exp |log pi_old - log mu| over tokens drawn
    from mu."""
    factor = np.exp(np.abs(world.log_pi - world.log_mu)) * world.sampled[:, None, None]
    return float(path_moments(np.exp(world.log_mu), factor[:, None])[1].sum()) / world.sampled.sum()
