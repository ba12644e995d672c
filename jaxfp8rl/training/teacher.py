"""A teacher: a frozen model of another shape in the place of the KL term's reference
(docs/distillation.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.tokenizer import Tokenizer, load_tokenizer
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig, named
from jaxfp8rl.models.loading import check_weights, load_params
from jaxfp8rl.policy.adapters import digest_of
from jaxfp8rl.policy.hardware import attention_of, check_kernels, products_of
from jaxfp8rl.policy.shapes import check_divides, teacher_config, teacher_runs
from jaxfp8rl.precision.records import Precision, Products
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score
from jaxfp8rl.types import Params, TrainBatch

ANOTHER = "name a teacher of the same family of tokenizers"


def check_teacher(cfg: Config, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Check the folder reference.path, if there is one, before anything loads. model, tokenizer: those of the
    policy that learns.

    Raises ModelError for a folder that is no model, and ConfigError for a teacher that does not suit the run:
    other tokens, fewer words or positions, a window of keys under train.shared_prefix, or widths that the
    mesh does not divide.
    """
    if not (path := cfg.reference.path):
        return
    teacher = teacher_config(cfg)
    with named("reference.path"):
        check_weights(path, teacher)
        tokens = load_tokenizer(path)
    if teacher.packed:
        raise ConfigError(f"reference.path: {path} is in four bits, which no teacher is yet",
                          'name the BF16 folder; reference.recipe = "fp8" takes half of its memory')
    if differ := _differences(tokenizer, tokens):
        raise ConfigError(f"reference.path: the tokenizer of {path} has other tokens: {differ}", ANOTHER)
    if teacher.vocab_size < model.vocab_size:
        raise ConfigError(
            f"reference.path: {path} has {teacher.vocab_size} words, and the policy may sample any of "
            f"{model.vocab_size}",
            ANOTHER)
    if cfg.max_model_len > teacher.max_position_embeddings:
        raise ConfigError(
            f"reference.path: {path} takes {teacher.max_position_embeddings} tokens at most, and "
            "task.max_prompt_tokens + "
            f"rollout.max_new_tokens = {cfg.max_model_len}", "lower one of the two, or name another teacher")
    if cfg.train.shared_prefix and any(kind.window_within(cfg.train.row_tokens) for kind in teacher.kinds):
        raise ConfigError(f"train.shared_prefix = {cfg.train.shared_prefix}: layers of the teacher see a "
                          f"window of keys",
                          "set train.shared_prefix = 0")
    check_divides(cfg.train.fsdp, cfg.train.tensor, teacher, cfg.reference.recipe == "fp8")
    check_kernels(cfg.precision.products, cfg.precision.attention, cfg.precision.compute_dtype, teacher)
    teacher_runs(cfg, teacher)


def _differences(ours: Tokenizer, theirs: Tokenizer) -> str:
    """The first tokens that the two number otherwise; "" if there are none."""
    a, b = ours.vocabulary, theirs.vocabulary
    if not (other := sorted(t for t in a.keys() | b.keys() if a.get(t) != b.get(t))):
        return ""
    shown = ", ".join(f"{t!r} is {a.get(t, 'absent')} here and {b.get(t, 'absent')} there" for t in other[:3])
    return f"{shown}; {len(other)} in all"


class Teacher(NamedTuple):
    """What stands as `RunContext.reference`. held: its weights, on the learner's devices. digest: of them
    (`digest_of`)."""

    held: Params
    score: Callable[[Params, TrainBatch], Array]
    digest: str

    def __call__(self, policy: Params, batch: TrainBatch) -> Array:
        """The teacher's log-probabilities of the sampled tokens, [M, R, T] float32, at
        rollout.temperature."""
        return self.score(self.held, batch._replace(routes=None))


def open_teacher(cfg: Config, layout: MeshLayout) -> Teacher:
    """The teacher in reference.path. Raises what `check_teacher` does of its folder."""
    model, params = load_params(cfg.reference.path, dtype=cfg.precision.weight_dtype)
    precision = _precision(cfg, model)
    score = make_score(make_logprobs(model, precision, cfg.rollout.temperature, cfg.train.remat, layout),
                       layout)
    placed = layout.place(params) if layout.mesh else jax.tree.map(jnp.asarray, params)
    return Teacher(make_policy(precision, layout=layout)(placed), score, digest_of(params))


def _precision(cfg: Config, model: ModelConfig) -> Precision:
    p, runs = cfg.precision, teacher_runs(cfg, model)
    fp8 = cfg.reference.recipe == "fp8"
    return Precision(
        runs, products=products_of(p.products, p.compute_dtype) if fp8 else Products.FLOAT32,
        attention=attention_of(p.attention, p.compute_dtype, model), compute_dtype=p.compute_dtype,
        weight_dtype=p.weight_dtype)
