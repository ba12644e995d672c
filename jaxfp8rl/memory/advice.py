"""Which settings of a config would make it fit, and by how much: the plan is made again with each of them
changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxfp8rl.config.resume_rules import MAY_CHANGE, changes
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError

Need = Callable[[Config], int]  # the bytes that a run of the config needs
SHOWN = 4  # the number of settings that an error suggests
GIB = 2**30


class Change(NamedTuple):
    """One change of a config: section -> key -> value, and its cost in words."""

    keys: dict[str, dict[str, Any]]
    cost: str

    def __str__(self) -> str:
        return ", ".join(f"{section}.{key} = {_toml(value)}" for section, keys in self.keys.items()
                         for key, value in keys.items())

    def of(self, cfg: Config) -> Config:
        """The config with this change."""
        return cfg.model_copy(update={section: getattr(cfg, section).model_copy(update=keys)
                                      for section, keys in self.keys.items()})


def advice(cfg: Config, need: Need, short: int, resumed: bool = False) -> str:
    """How to bring down `need` of the config by `short` bytes: the settings that do it alone, the cheapest
    first; or else the fewest that do it together; or else a smaller model. `resumed`: only settings that a
    resumed run may change."""
    before = need(cfg)
    found = [(change, before - need(changed)) for change, changed in valid(cfg, resumed)]
    found = _without_dearer([(change, saved) for change, saved in found if saved > 0])
    if enough := [(change, saved) for change, saved in found if saved >= short]:
        head = "each of these makes it fit" if len(enough) > 1 else "this makes it fit"
        return _listed(f"{head}, the cheapest first" if len(enough) > 1 else head, enough[:SHOWN], short)
    chosen = together(cfg, need, short, resumed)
    needs = [need(_with(cfg, chosen[:i])) for i in range(len(chosen) + 1)]
    listed = [(change, needs[i] - needs[i + 1]) for i, change in enumerate(chosen)]  # beyond those before it
    saved = before - needs[-1]
    if saved >= short:
        return _listed(f"these make it fit together, with {(saved - short) / GIB:.1f} GiB to spare", listed)
    if not chosen:
        return "a smaller model: no setting of this config saves memory"
    left = f"{(short - saved) / GIB:.1f} GiB"
    return _listed(f"a smaller model, or more GPUs: with all of these it is {left} too large", listed)


def together(cfg: Config, need: Need, short: int, resumed: bool = False) -> list[Change]:
    """The changes that bring down `need` by `short` bytes together, none of which can be left out; all that
    save anything where that is not enough."""
    chosen: list[Change] = []
    enough = lambda changed: need(cfg) - need(_with(cfg, changed)) >= short
    for change in options(cfg):
        now = _with(cfg, chosen)
        if _allowed(changed := change.of(now), cfg, resumed) and need(changed) < need(now):
            chosen.append(change)
        if enough(chosen):
            break
    for change in list(chosen):
        rest = [other for other in chosen if other is not change]
        if need(_with(cfg, rest)) <= need(_with(cfg, chosen)) or (
                enough(rest) and _allowed(_with(cfg, rest), cfg, resumed)):
            chosen = rest
    return chosen


def valid(cfg: Config, resumed: bool = False) -> Iterator[tuple[Change, Config]]:
    """(change, config with it) for each single change that is valid with the other settings, and that a
    resumed run may make, if it is `resumed`."""
    for change in options(cfg):
        if _allowed(changed := change.of(cfg), cfg, resumed):
            yield change, changed


def options(cfg: Config) -> list[Change]:
    """Changes of the config that may save memory, the cheapest first. The numbers that a step learns from
    stay the same but for the last two."""
    found = [*_of_engine(cfg), *_of_update(cfg), *_of_optimiser(cfg)]
    t, r = cfg.train, cfg.rollout
    found.append(Change({"train": {"fsdp": 2 * t.fsdp} | _rows(t.rows_per_microbatch, 2 * t.over_rows)},
                        "twice as many GPUs"))
    half = r.max_new_tokens // 2
    rows = {"row_tokens": max(t.row_tokens // 2, cfg.max_model_len - r.max_new_tokens + half)}
    if half:
        found.append(Change({"rollout": {"max_new_tokens": half}, "train": rows}, "shorter completions"))
    return [change for change in found if changes(cfg, change.of(cfg))]


def _of_engine(cfg: Config) -> Iterator[Change]:
    r = cfg.rollout
    if r.engine == "vllm":
        yield Change({"rollout": {"sleep": "drop_weights", "one_copy": False}},
                     "the engine wakes and sleeps once a step")
        if r.kv_cache_gib and r.kv_cache_gib != "auto":
            yield Change({"rollout": {"kv_cache_gib": r.kv_cache_gib / 2}}, "fewer completions at a time")
    if r.engine == "jax" and r.max_num_seqs > 1:
        yield Change({"rollout": {"max_num_seqs": r.max_num_seqs // 2}}, "fewer completions at a time")


def _of_update(cfg: Config) -> Iterator[Change]:
    t = cfg.train
    if t.rows_per_microbatch > t.over_rows:
        yield Change({"train": _rows(t.rows_per_microbatch // 2, t.over_rows)}, "more micro-batches")
    if t.row_tokens > cfg.max_model_len:
        shorter = max(t.row_tokens // 2, cfg.max_model_len)
        yield Change({"train": {"row_tokens": shorter}}, "more micro-batches")
    for remat in ("mlp", "layer"):
        yield Change({"train": {"remat": remat}}, "more is computed again in the backward pass")


def _of_optimiser(cfg: Config) -> Iterator[Change]:
    yield Change({"optim": {"first_moment": "float8", "second_moment": "bfloat16"}}, "rounded moments")
    yield Change({"optim": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"}},
                 "rounded masters and moments")
    yield Change({"optim": {"gradient_sums": "bfloat16"}}, "sums of gradients rounded at random")
    yield Change({"optim": {"offload": True}}, "moments cross to the host and back in each update")


def _rows(at_least: int, parts: int) -> dict[str, Any]:
    """Rounded up, so that each device has whole rows."""
    return {"rows_per_microbatch": -(-at_least // parts) * parts}


def _allowed(changed: Config, cfg: Config, resumed: bool) -> bool:
    if resumed and any(key not in MAY_CHANGE.get(section, ()) for section, key in changes(cfg, changed)):
        return False
    try:
        check(changed)
    except ConfigError:
        return False
    return True


def _with(cfg: Config, changes_: Iterable[Change]) -> Config:
    for change in changes_:
        cfg = change.of(cfg)
    return cfg


def _without_dearer(found: list[tuple[Change, int]]) -> list[tuple[Change, int]]:
    """The changes without those that contain a cheaper one and save no more."""
    kept: list[tuple[Change, int]] = []
    for change, saved in found:
        settings = set(str(change).split(", "))
        if not any(settings >= set(str(cheaper).split(", ")) and saved <= gain for cheaper, gain in kept):
            kept.append((change, saved))
    return kept


def _listed(head: str, found: list[tuple[Change, int]], short: int | None = None) -> str:
    """A line for each change: what it saves alone, what is to spare, what it costs."""
    spare = lambda saved: "" if short is None else f", {(saved - short) / GIB:.1f} to spare"
    return "\n".join([f"{head}:", *(f"    {change}  ({saved / GIB:.1f} GiB less{spare(saved)}; {change.cost})"
                                    for change, saved in found)])


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
