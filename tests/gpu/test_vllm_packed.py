"""Folders in four bits under adapters in vLLM's slots, with CUDA graphs: Marlin or Humming multiplies by the
learner's numbers, and samples from its policy."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from packed_world import World, opened, packed_folder, policy_of

from bridges.api import PublishFailed
from bridges.inside_vllm import packed
from jaxfp8rl.models.packed_config import FORMS


@pytest.fixture(scope="module", params=FORMS)
def world(request, tmp_path_factory):
    with opened(packed_folder(tmp_path_factory.mktemp("packed"), request.param, 0), request.param) as found:
        yield found


def form_of(world: World) -> str:
    return world.engine.capabilities().formats.weights


def test_the_kernel_is_one_of_weights_alone(world):
    kernels = {packed.kernel(linear) for linear in world.engine.linears}
    assert all(any(name in kernel for name in ("Marlin", "Humming", "Machete"))
               for kernel in kernels), kernels


def test_adapters_over_the_folder_that_vllm_read(world):
    source = world.source(1)
    world.transport.publish(source, 1)
    second = world.transport.publish(world.source(2), 2)  # through graphs that were captured before
    world.transport.verify(second)
    own, other = world.gap(world.source(2)), world.gap(source)
    assert own < 0.1 and other > 0.5, (own, other)


def test_another_folder_is_found_by_its_numbers(world, tmp_path):
    _, other = policy_of(packed_folder(tmp_path, form_of(world), 1))
    with pytest.raises(PublishFailed, match=r"layers.0.self_attn.q_proj.weight is not the source's"):
        world.transport.publish(world.source(1, other), 3)
    world.transport.publish(world.source(1), 4)
