"""Whole programs compiled for an H200 by JAX's CUDA plug-in, without a GPU. They need SM90A, the folder where
requirements/sm90a.txt is installed (`make sm90a`), and are skipped without it."""

from __future__ import annotations

import argparse

import jax
import pytest
from hopper import SITE, compiled, lowered

from benchmarks.common import config
from benchmarks.step import OPTIMIZERS, batch_of, precision_of, rows_of
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from pallas_kernels.logprob import api as logprob


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/sm90a" in str(item.path) and not SITE:
            item.add_marker(pytest.mark.skip(reason="needs requirements/sm90a.txt: make sm90a"))


@pytest.fixture(scope="session")
def compiled_step():
    """step(size, recipe, tokens, layers, remat) -> {"score", "update": jax.stages.Compiled} of
    benchmarks/step.py's learner: two micro-batches of one row of this many tokens, low-bit moments."""

    def step(size: str, recipe: str, tokens: int, layers: int = 0,
             remat: str = "mlp") -> dict[str, jax.stages.Compiled]:
        model = ModelConfig.from_hf(config(size, layers))
        precision, optimizer = precision_of(model, recipe), make_optimizer(Optim(**OPTIMIZERS["low"]), 10)
        logprobs = make_logprobs(model, precision, 1.0, remat)
        score = make_score(logprobs)
        update = make_train_step(logprobs, precision, Loss(), Correction().resolve(), optimizer).__wrapped__
        args = argparse.Namespace(row_tokens=tokens, segments=8, microbatches=2, data=1, fsdp=1, tensor=1)
        state = jax.eval_shape(lambda key: init_state(init_params(model, key), optimizer, "bfloat16"),
                               jax.random.key(0))
        policy, batch = jax.eval_shape(make_policy(precision),
                                       state.params), batch_of(rows_of(args, model), args)
        with pytest.MonkeyPatch.context() as patch:
            # there is no Hopper GPU for "auto" to find
            patch.setattr(logprob, "use_kernel", lambda backend: True)
            old = jax.eval_shape(score, policy, batch)
            return {"score": compiled(lowered("h200", score, policy, batch)),
                    "update": compiled(lowered("h200", update, state, *partition(policy), batch, old))}

    return step
