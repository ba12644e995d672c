"""A learner of adapters: its outputs and gradients are PEFT's, and its base neither learns nor costs a
gradient."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_step import KEEP, MIXED, MODEL, laid_out, params

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward, forward_cached, init_cache
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import over_base, partition
from jaxfp8rl.precision.adapters import LORA, A, B
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import fused_linears
from jaxfp8rl.precision.records import AdapterProduct, Gradients, Precision
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compile")
RANK, ALPHA = 3, 7.0
PLAIN = Precision.uniform(2, weight_dtype="float32")
ADAPTED = dataclasses.replace(PLAIN, adapters=AdapterProduct(ALPHA / RANK, "float32"))
LINEARS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
           "mlp": ("gate_proj", "up_proj", "down_proj")}
TORCH = ["formula", "peft"]


def adapters(model: ModelConfig = MODEL, zero: bool = False):
    """Random pairs for every linear, B of the size of A; or B zero."""
    weights, rng = jax.eval_shape(lambda: init_params(model,
                                                      jax.random.key(0)))["layers"], np.random.default_rng(5)

    def pair(shape):
        layers, n, k = shape
        a, b = (rng.uniform(-0.4, 0.4, (layers, *s)).astype(np.float32) for s in ((RANK, k), (n, RANK)))
        return {A: jnp.asarray(a), B: jnp.asarray(0 * b if zero else b)}

    return {"layers": {LORA: {part: {name: pair(weights[part][name]["weight"].shape) for name in names}
                              for part, names in LINEARS.items()}}}


def policy_with(precision: Precision, adapters, weights=None):
    make = make_policy(precision)
    return over_base(make(adapters), make(weights or params()))


@functools.cache
def step_of_adapters(precision: Precision = ADAPTED):
    logprobs = make_logprobs(MODEL, precision, 1.0, remat="none")
    return make_score(logprobs), make_train_step(logprobs, precision, Loss(), CorrectionConfig(), KEEP)


def on_policy(layout):
    """A batch whose engine agrees with the learner, and the learner's log-probabilities."""
    batch = laid_out(MIXED, layout)
    old = np.asarray(step_of_adapters()[0](policy_with(ADAPTED, adapters()), batch))
    return batch._replace(rollout_logp=np.where(batch.response_mask, old, 0)), old


def gradients(layout):
    batch, old = on_policy(layout)
    state, policy, _ = step_of_adapters()[1](init_state(adapters(), KEEP), policy_with(ADAPTED, adapters()),
                                             batch, old)
    return jax.tree.map(np.asarray, state.opt_state)["layers"][LORA], policy


@functools.cache
def torch_model(kind: str, folder: str):
    """The same model with the same adapters in transformers, by PEFT or by its formula, and (A, B) of a
    linear of a layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save_params(folder, MODEL, params(), dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind == "peft":
        peft = pytest.importorskip("peft")
        names = [name for part in LINEARS.values() for name in part]
        model = peft.get_peft_model(model,
                                    peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names)).eval()
        base = model.base_model.model
    else:
        base = model
        for p in model.parameters():
            p.requires_grad_(False)

    class WithAdapter(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.a, self.b = (torch.nn.Parameter(torch.zeros(s)) for s in (
                (RANK, linear.in_features), (linear.out_features, RANK)))

        def forward(self, x):
            return self.linear(x) + ALPHA / RANK * (x @ self.a.T) @ self.b.T

    pairs = {}
    for i, layer in enumerate(base.model.layers):
        for part, names in LINEARS.items():
            for name in names:
                block = getattr(layer, part)
                if kind == "peft":
                    linear = getattr(block, name)
                    found = linear.lora_A["default"].weight, linear.lora_B["default"].weight
                else:
                    setattr(block, name, WithAdapter(getattr(block, name)))
                    found = getattr(block, name).a, getattr(block, name).b
                ours = adapters()["layers"][LORA][part][name]
                with torch.no_grad():
                    for parameter, which in zip(found, (A, B)):
                        parameter.copy_(torch.tensor(np.asarray(ours[which][i])))
                pairs[part, name, i] = found
    return model, pairs


def torch_logps(model, sample):
    import torch

    tokens = torch.tensor(np.concatenate([sample.prompt, sample.completion])[None].astype(np.int64))
    logps = torch.log_softmax(model(tokens).logits[0, :-1], -1)
    return logps.gather(1, tokens[0, 1:, None])[-len(sample.completion):, 0]


@pytest.mark.parametrize("kind", TORCH)
def test_outputs_and_gradients_are_those_of_peft(kind, tmp_path_factory):
    """Packed rows, two micro-batches, tied heads, a scan over the layers."""
    import torch

    model, pairs = torch_model(kind, str(tmp_path_factory.mktemp("base") / "m"))
    batch, old = on_policy((2, 2, 36))
    want = [torch_logps(model, s) for s in MIXED]
    np.testing.assert_allclose(np.sort(old[batch.response_mask]),
                               np.sort(torch.cat(want).detach().numpy()), atol=1e-5)
    tokens = sum(len(s.completion) for s in MIXED)
    (-sum(s.advantage * logps.sum() for s, logps in zip(MIXED, want)) / tokens).backward()
    ours, _ = gradients((2, 2, 36))
    for (part, name, i), pair in pairs.items():
        for parameter, which in zip(pair, (A, B)):
            assert isinstance(parameter.grad, torch.Tensor)
            theirs = parameter.grad.numpy()
            assert np.abs(theirs).max() > 1e-4
            np.testing.assert_allclose(ours[part][name][which][i], theirs, atol=1e-5)


def test_the_update_returns_the_base_it_was_given():
    _, policy = gradients((2, 2, 36))
    (own, base), before = partition(policy), policy_with(ADAPTED, adapters())
    assert jax.tree.structure(policy) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, base, partition(before)[1])
    assert set(own) == {"layers"} and all(set(stack) == {LORA} for stack in own["layers"])


def products_of_weights(precision: Precision, state, policy) -> list[str]:
    """The products of an update's program whose result has the shape of a weight of the MLP."""
    batch = laid_out(MIXED, (2, 2, 36))
    step = make_train_step(make_logprobs(MODEL, precision, 1.0, remat="none"), precision, Loss(),
                           CorrectionConfig(),
                           KEEP)
    lowered = step.__wrapped__.lower(state, *partition(policy), batch, batch.rollout_logp)
    return re.findall(r"= \w+\[(?:48,32|32,48)\]\S* dot\(", lowered.compile().as_text())


def test_there_is_no_gradient_of_the_base():
    masters = adapters()
    assert not products_of_weights(ADAPTED, init_state(masters, KEEP), policy_with(ADAPTED, masters))
    everything = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    assert products_of_weights(PLAIN, everything, make_policy(PLAIN)(params()))  # so it would have been found


WIDE = ModelConfig("Qwen3ForCausalLM", 64, 128, 256, 2, 2, 1, 64, 64)
FP8 = frozenset(name for names in LINEARS.values() for name in names)
FORMATS = {
    "bf16": Precision.uniform(2, "bfloat16"),
    "fp8": Precision((LayerRun(0, 1, frozenset()), LayerRun(1, 2, FP8)), gradients="e4m3"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_fresh_adapters_leave_every_bit_of_the_base(name):
    """Packed, and through the cache."""
    plain = FORMATS[name]
    adapted = dataclasses.replace(plain, adapters=AdapterProduct(2.0, "bfloat16"))
    weights = jax.tree.map(lambda p: 3 * p, init_params(WIDE, jax.random.key(1)))
    base = make_policy(plain)(weights)
    policy = over_base(make_policy(adapted)(adapters(WIDE, zero=True)), base)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 16))
    places = np.broadcast_to(np.arange(16), tokens.shape)
    jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    packed = jit(lambda w, p: forward(w, WIDE, tokens, places, np.ones_like(tokens), p), static_argnums=1)
    cached = jit(lambda w, p: forward_cached(w, WIDE, tokens, places, init_cache(WIDE, 2, 16, p), p)[0],
                 static_argnums=1)
    for compute in (packed, cached):
        np.testing.assert_array_equal(compute(base, plain), compute(policy, adapted))
    moved = over_base(make_policy(adapted)(adapters(WIDE)), base)
    assert np.abs(np.float32(packed(moved, adapted)) - np.float32(packed(base, plain))).max() > 0.1


@pytest.mark.parametrize("rows", [(128, 256), (100, 256)])
@pytest.mark.parametrize("gradients", ["high", "e4m3", "e5m2"])
def test_a_frozen_fp8_product_has_the_input_gradient_of_one_that_learns(gradients, rows):
    precision = Precision((LayerRun(0, 1, FP8),), compute_dtype="float32", gradients=Gradients(gradients))
    rng = np.random.default_rng(3)
    weights = [QuantizedWeight.of(jnp.asarray(rng.standard_normal((n, 256), np.float32))) for n in rows]
    x = jnp.asarray(rng.standard_normal((5, 256), np.float32))
    dys = [jnp.asarray(rng.standard_normal((5, n), np.float32)) for n in rows]

    def dx(weights):
        ys, pull = jax.vjp(lambda x: fused_linears(x, weights, precision), x)
        return ys, pull(tuple(dys))[0]

    slots = [WeightWithGradSlot(w, jnp.zeros(w.codes.shape)) for w in weights]
    jax.tree.map(np.testing.assert_array_equal, dx(weights), dx(slots))

