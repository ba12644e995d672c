"""Publishing into the tensors that vLLM's CUDA graphs read: contracts, addresses, equality with a cold
engine, and the proof."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import tiny_vllm

from bridges.api import BridgeError, EngineDirty, PublishFailed
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.sources.array_source import random_source

CONFIG = tiny_vllm.CONFIG | {"intermediate_size": 512, "num_hidden_layers": 3}
FIRST = [f"model.layers.0.self_attn.{m}_proj" for m in "qkvo"]  # one layer's attention in BF16
OPTIONS = {"weights": "fp8_e4m3_128x128", "kv_cache": "fp8_e4m3", "kv_scales": True, "max_model_len": 256,
           "kv_cache_bytes": 2**26, "high_precision_modules": FIRST}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=["graphs", "eager"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def cold(mode):
    """What an engine says that was built for these weights alone and loaded by vLLM itself."""
    from bridges.transports.vllm_reload import VllmReload

    e = build(VllmReload, mode)
    e.publish(5)
    said = e.sample(temperature=0.0, max_tokens=16) + e.sample(n=2, seed=3, max_tokens=16)
    e.engine.close()
    return said


@pytest.fixture(scope="module")
def under_test(cold, mode):
    from bridges.transports.vllm_inplace import VllmInplace

    e = build(VllmInplace, mode)
    yield e
    e.transport.close()
    e.engine.close()


def build(transport: type, mode: str) -> EngineUnderTest:
    from bridges.engines.vllm_engine import VllmEngine

    engine, transport = VllmEngine(CONFIG, max_num_seqs=64, enforce_eager=mode == "eager",
                                   **OPTIONS), transport()
    transport.open(engine)
    return EngineUnderTest(engine, transport,
                           lambda seed: random_source(engine.expected_manifest(), seed, convert=jnp.asarray))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_after_1_3_and_20_publishes_it_says_what_a_cold_engine_says(under_test, cold):
    """Greedy tokens equal, log-probabilities bit for bit; other weights go in between, and no tensor
    moves."""
    before = addresses(under_test)
    for count in (1, 3, 20):
        for seed in range(count - 1):
            under_test.publish(10 + seed % 3)
        under_test.publish(5)
        said = under_test.sample(temperature=0.0,
                                 max_tokens=16) + under_test.sample(n=2, seed=3, max_tokens=16)
        for a, b in zip(said, cold, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids, err_msg=f"after {count} publishes")
            np.testing.assert_array_equal(a.logprobs, b.logprobs, err_msg=f"after {count} publishes")
    assert addresses(under_test) == before


def test_another_current_gpu_does_not_matter(under_test):
    """Programs of JAX on several GPUs leave one of them as the thread's current one."""
    import torch

    if (last := torch.cuda.device_count() - 1) < 1:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(last)
    receipt = under_test.publish(5)
    torch.cuda.set_device(last)
    under_test.transport.verify(receipt)
    torch.cuda.set_device(last)
    assert under_test.sample(temperature=0.0, max_tokens=16)


def test_a_flipped_bit_is_found_and_makes_the_engine_dirty(under_test):
    receipt = under_test.publish(5)
    flip(under_test.transport.targets[WEIGHT])
    with pytest.raises(PublishFailed, match=f"1 of .* tensors .* differ .* first {WEIGHT}"):
        under_test.transport.verify(receipt)
    with pytest.raises(EngineDirty):
        under_test.sample()
    assert under_test.publish(5).content == receipt.content


def test_a_scale_of_zero_is_refused(under_test):
    good = under_test.source(5)
    name = WEIGHT + "_scale_inv"
    bad = dataclasses.replace(good, arrays=good.arrays | {name: good.arrays[name].at[0, 0].set(0)})
    with pytest.raises(PublishFailed, match=f"{name} holds a scale that is not positive and finite"):
        under_test.transport.publish(bad, next(under_test.versions))
    with pytest.raises(EngineDirty):
        under_test.sample()
    under_test.publish(5)


def test_what_is_lent_is_what_was_published_until_the_next_publish(under_test):
    source, names = under_test.source(5), [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    under_test.publish(5)
    lent = under_test.transport.lend(names)
    for i, name in enumerate(names):
        want = np.asarray(source.arrays[name]).view(np.uint8)
        np.testing.assert_array_equal(lent.codes[i, lent.start : lent.stop], want)
        np.testing.assert_array_equal(lent.scale[i], source.arrays[f"{name}_scale_inv"])
    under_test.publish(6)
    assert lent.codes.is_deleted()


def test_scales_of_attention_reach_what_the_graphs_read(under_test):
    """Keys and queries rounded in other units: other log-probabilities, and the first ones again with the
    first scales."""
    good = under_test.source(5)
    coarse = {m.name: good.arrays[m.name] * 2.0**12 for m in good.metas if m.role == "kv_scale"}
    said = []
    for arrays in (good.arrays, good.arrays | coarse, good.arrays):
        under_test.transport.publish(dataclasses.replace(good, arrays=arrays), next(under_test.versions))
        said.append(under_test.sample(temperature=0.0, max_tokens=16)[0].logprobs)
    assert (said[0] != said[1]).any()
    np.testing.assert_array_equal(said[0], said[2])


def test_a_layout_not_known_is_refused_by_name(under_test):
    from bridges.transports.vllm_inplace import VllmInplace

    transposed(under_test, WEIGHT)
    with pytest.raises(BridgeError,
                       match="model.layers.1.mlp.gate_proj.weight cannot be written in place: .*row-major"):
        VllmInplace().open(under_test.engine)
    transposed(under_test, WEIGHT)
    VllmInplace().open(under_test.engine)


def addresses(e: EngineUnderTest) -> list[int]:
    return e.engine.on_model(lambda model: [p.data_ptr() for p in model.parameters()])


def flip(tensor) -> None:
    import torch

    tensor.view(torch.uint8)[3, 5] ^= 1


def transposed(e: EngineUnderTest, name: str) -> None:
    """Exchange the axes of the parameter that holds `name`, as some kernels want it."""
    owner = name.replace("up_proj", "gate_up_proj").removesuffix(".weight")

    def exchange(model) -> None:
        parameter = model.get_submodule(owner).weight
        parameter.data = parameter.data.t()

    e.engine.on_model(exchange)
