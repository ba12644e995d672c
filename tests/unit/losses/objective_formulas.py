"""Every objective in float64: of the live tokens of one sequence (current, proximal and advantages, [T]) the
losses [T], the Jacobian dloss_t/dlogp_u [T, T], and the distances to each bound."""

import functools

import numpy as np

from jaxfp8rl.losses.objectives import ObjectiveConfig


def bounded(c, p):
    d = c - p
    return np.exp(np.clip(d, -20, 20)), (np.abs(d) < 20).astype(float)


def oracle(config: ObjectiveConfig, c, p, a):
    kind, given_ = config.kind, {k: v for k, v in config._asdict().items() if v is not None and k != "kind"}
    return {"ppo_clip": o_ppo, "gspo": o_gspo, "gspo_token": functools.partial(o_gspo, token=True),
            "cispo": o_cispo,
            "sapo": o_sapo, "gmpo": o_gmpo, "dppo_tv": o_dppo_tv, "dppo_kl": o_dppo_kl,
            "reinforce": o_reinforce,
            "prime_rl": o_prime, "clip_cov": o_ppo, "kl_cov": o_plain}[kind](c, p, a, **given_)


def o_ppo(c, p, a, clip_low=0.2, clip_high=0.2, dual_clip=None):
    r, free = bounded(c, p)
    value = -np.minimum(r * a, np.clip(r, 1 - clip_low, 1 + clip_high) * a)
    live = np.where(a > 0, r <= 1 + clip_high, r >= 1 - clip_low)
    near = [r - 1 - clip_high, r - 1 + clip_low]
    if dual_clip:
        live = live & ~((a < 0) & (value > -dual_clip * a))
        value = np.where(a < 0, np.minimum(value, -dual_clip * a), value)
        near.append(r - dual_clip)
    return value, np.diag(-a * r * live * free), near


def o_gspo(c, p, a, clip_low=3e-4, clip_high=4e-4, token=False):
    n, mean = len(c), (c - p).mean()
    s, free = np.exp(min(mean, 10)), mean < 10
    value = -np.minimum(s * a, np.clip(s, 1 - clip_low, 1 + clip_high) * a)
    slope = -a * s * free * np.where(a > 0, s <= 1 + clip_high, s >= 1 - clip_low)
    jacobian = np.diag(slope) if token else slope[:, None] * np.full((n, n), 1 / n)
    return value, jacobian, [s - 1 - clip_high, s - 1 + clip_low]


def o_cispo(c, p, a, clip_low=1.0, clip_high=5.0):
    w = np.clip(bounded(c, p)[0], 1 - clip_low, 1 + clip_high)
    return -w * a * c, np.diag(-w * a), []


def o_sapo(c, p, a, tau_positive=1.0, tau_negative=1.05):
    r, free = bounded(c, p)
    tau = np.where(a > 0, tau_positive, tau_negative)
    gate = 1 / (1 + np.exp(-tau * (r - 1)))
    gate_slope = np.exp(-tau * (r - 1)) * gate**2  # 1 - gate would round to 0
    return -a * 4 / tau * gate, np.diag(-a * 4 * gate_slope * r * free), []


def o_gmpo(c, p, a, clip_low=0.4, clip_high=0.4):
    n, d, sign = len(c), c - p, np.sign(a)
    inner = sign * np.minimum(sign * d, sign * np.clip(d, -clip_low, clip_high))
    free = (inner == d) & (inner.mean() < 20)
    s = np.exp(min(inner.mean(), 20))
    return -a * s, (-a * s)[:, None] * free[None] / n, [d - clip_high, d + clip_low]


def o_trust(c, p, a, keep, cap):
    w = np.minimum(bounded(c, p)[0], cap) * keep
    return -w * a * c, np.diag(-w * a)


def o_dppo_tv(c, p, a, clip_low=0.15, clip_high=0.15, ratio_cap=3.0):
    moved = np.exp(c) - np.exp(p)
    keep = np.where(a > 0, moved <= clip_high, moved >= -clip_low)
    return *o_trust(c, p, a, keep, ratio_cap), [moved - clip_high, moved + clip_low]


def o_dppo_kl(c, p, a, clip_low=0.05, clip_high=0.05, ratio_cap=3.0):
    now, old = np.exp(c), np.exp(p)
    kl = old * (p - c) + (1 - old) * np.log((1 - old + 1e-8) / (1 - now + 1e-8))
    keep = np.where(a > 0, (kl <= clip_high) | (now <= old), (kl <= clip_low) | (now >= old))
    return *o_trust(c, p, a, keep, ratio_cap), [kl - clip_high, kl - clip_low]


def o_reinforce(c, p, a, ratio_cap=None):
    return o_trust(c, p if ratio_cap else c, a, 1.0, ratio_cap or np.inf)[:2] + ([],)


def o_prime(c, p, a, clip_low=0.2, clip_high=0.2, penalty=1e-3):
    (r, free), moved = bounded(c, p), np.exp(c) - np.exp(p)
    keep = np.where(a > 0, moved <= clip_high, moved >= -clip_low)
    slope = -r * a * keep * free + 2 * penalty * (c - p)
    return -r * a * keep + penalty * (c - p) ** 2, np.diag(slope), [moved - clip_high, moved + clip_low]


def o_plain(c, p, a):
    r, free = bounded(c, p)
    return -r * a, np.diag(-r * a * free), []
