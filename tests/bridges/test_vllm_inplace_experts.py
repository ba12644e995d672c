"""A mixture's experts written in place, and whole publishes of them, into an engine whose vLLM is a plain
torch module."""

from __future__ import annotations

import gc
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridges.api import BridgeError, EngineUnhealthy, ParamMeta, PublishFailed, Rows, StackRow  # noqa: E402
from bridges.engines.vllm_engine import VllmEngine  # noqa: E402
from bridges.engines.vllm_in_flight import Flights
from bridges.engines.weight_state import WeightState  # noqa: E402
from bridges.inside_vllm import params  # noqa: E402
from bridges.inside_vllm.params import Place  # noqa: E402
from bridges.inside_vllm.stacks import stacks_of  # noqa: E402
from bridges.proof.byte_digest import digest_of  # noqa: E402
from bridges.sources.array_source import ArraySource  # noqa: E402
from bridges.sources.dlpack import torch_view  # noqa: E402
from bridges.transports.vllm_inplace import VllmInplace, _Reader  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_collections")
LAYERS = 6


class UnquantizedFusedMoEMethod:
    """vLLM's by name."""

    def __init__(self, kernel: str):
        self.unquantized_backend = types.SimpleNamespace(name=kernel)


E, F, D = 5, 4, 8
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}


def experts(kernel: str = "TRITON", stacked: bool = True) -> tuple[torch.nn.Module, list[Place]]:
    """LAYERS modules with the experts of a layer in w13_weight [E, 2F, D] and w2_weight [E, D, F], their
    layers in one tensor or not."""
    model, places = torch.nn.Module(), []
    sizes = {"w13_weight": (E, 2 * F, D), "w2_weight": (E, D, F)}
    wholes = {leaf: torch.full((LAYERS, *size), -1.0) for leaf, size in sizes.items()}
    for i in range(LAYERS):
        model.add_module(f"layer{i}", module := torch.nn.Module())
        module.quant_method, path = UnquantizedFusedMoEMethod(kernel), f"model.layers.{i}.mlp.experts"
        for leaf, size in sizes.items():
            row = wholes[leaf][i] if stacked else wholes[leaf][i].clone()
            module.register_parameter(leaf, torch.nn.Parameter(row, requires_grad=False))
            places += [Place(ParamMeta(name, "float32", shape), path, module, leaf, start, size, expert)
                       for name, shape, start, expert in params._experts(path, leaf, size)]
    return model, places


class OfExperts:
    """A source of three stacks of experts [L, E, N, K]: gate's is held, the others are made in two parts."""

    def __init__(self):
        count = LAYERS * E * F * D
        self.stacks_of = {name: jnp.arange(k * count, (k + 1) * count,
                                           dtype=jnp.float32).reshape(LAYERS, E, *shape)
                          for k, (name, shape) in enumerate(SHAPES.items())}

    def manifest(self):
        return ()

    def names(self, which, layers):
        return tuple(f"model.layers.{i}.mlp.experts.{e}.{which}.weight" for i in layers for e in range(E))

    def stacks(self, nbytes):
        gate, *others = SHAPES
        yield [Rows(self.names(gate, range(2, LAYERS)), self.stacks_of[gate], 2 * E, True)]
        yield [Rows(self.names(gate, range(2)), self.stacks_of[gate], 0, True)]
        for which in others:
            for at in (0, 3):
                yield [Rows(self.names(which, range(at, at + 3)), self.stacks_of[which][at : at + 3] + 0, 0,
                            False)]

    def __iter__(self):
        return iter([(f"model.layers.{i}.mlp.experts.{e}.{which}.weight", stack[i, e])
                     for i in range(LAYERS) for e in range(E) for which, stack in self.stacks_of.items()])


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_arrive_in_the_halves_that_vllm_joins(found, stacked):
    """Layers of the engine's experts are rows of one tensor, or tensors by themselves."""
    source, (model, places) = OfExperts(), experts(stacked=stacked)
    transport = VllmInplace()
    transport._rows = found(model, places)
    transport.targets = {r.meta.name: r.tensor for r in transport._rows}
    transport._place, transport._spans = {name: i for i, name in enumerate(transport.targets)}, {}
    runs = stacks_of(transport._rows)
    assert [len(rows) for rows in runs] == ([LAYERS * E] if stacked else [E] * LAYERS) * 3
    by_stacks = transport._write(source, ())()
    for i in range(LAYERS):
        module = model.get_submodule(f"layer{i}")
        np.testing.assert_array_equal(module.w13_weight[:, :F], source.stacks_of["gate_proj"][i])
        np.testing.assert_array_equal(module.w13_weight[:, F:], source.stacks_of["up_proj"][i])
        np.testing.assert_array_equal(module.w2_weight, source.stacks_of["down_proj"][i])
    one_by_one = list(source)
    metas = [transport._rows[transport._place[name]].meta for name, _ in one_by_one]
    np.testing.assert_array_equal(by_stacks, transport._write(one_by_one, metas)())
    readers = [_Reader([rows]) for rows in runs]
    names = [r.meta.name for reader in readers for r in reader.rows]
    read = dict(zip(names, np.concatenate([np.asarray(r())[:, :2] for r in readers]).tolist()))
    assert [read[name] for name in transport.targets] == by_stacks.tolist()
    assert not any(r.moved() for r in transport._rows)
    module.w2_weight.data = module.w2_weight.data.clone()
    assert sum(r.moved() for r in transport._rows) == E


def expert_metas() -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(f"model.layers.{i}.mlp.experts.{e}.{which}.weight", "float32", SHAPES[which])
                 for i in range(LAYERS) for e in range(E) for which in SHAPES)


class ExpertsByLayer:
    """gate's experts are rows of the learner's stack of all layers; those of up are made a layer at a time,
    and counted."""

    def __init__(self):
        self.whole, self.alive, self.most = OfExperts().stacks_of, [], 0

    def __iter__(self):
        for i in range(LAYERS):
            made = self.whole["up_proj"][i] + 0
            self.alive.append(weakref.ref(made))
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            for e in range(E):
                rows = StackRow(self.whole["gate_proj"],
                                (i, e)), StackRow(made, e), StackRow(self.whole["down_proj"], (i, e))
                yield from ((f"model.layers.{i}.mlp.experts.{e}.{which}.weight", row)
                            for which, row in zip(SHAPES, rows))
            del made, rows


def test_experts_a_layer_at_a_time_arrive_and_those_that_were_made_are_let_go(found):
    """As they go over a link between GPUs, and into an engine of this process."""
    source, (model, places), metas = ExpertsByLayer(), experts(), expert_metas()
    want = {name: np.asarray(array) for name, array in OfExperts()}
    digests = []
    for name, buffer in source:
        data = torch_view(buffer)
        np.testing.assert_array_equal(data.numpy(), want[name])
        digests.append(digest_of(data))
    del buffer, data
    assert source.most == 1
    transport, source = VllmInplace(), ExpertsByLayer()
    transport._rows = found(model, places)
    transport.targets = {r.meta.name: r.tensor for r in transport._rows}
    transport._place = {name: i for i, name in enumerate(transport.targets)}
    np.testing.assert_array_equal(
        transport._write(source, metas)()[[transport._place[m.name] for m in metas]], digests)
    for name, target in transport.targets.items():
        np.testing.assert_array_equal(target.numpy(), want[name])
    assert source.most == 2


@pytest.fixture
def engine(found):
    return scripted_engine(found)


def scripted_engine(found, stacked: bool = True) -> VllmEngine:
    """A VllmEngine whose vLLM is the experts' model and nothing else."""
    model, places = experts(stacked=stacked)
    found(model, places)
    scripted = object.__new__(VllmEngine)
    scripted._state, scripted._sick, scripted._broken, scripted._asleep, scripted._cache_asleep = WeightState(
        ), "", *[False] * 3
    scripted._flights = Flights(None, lambda *_: None, lambda *_: None)
    scripted._manifest, scripted.kv_scale_places = expert_metas(), ()
    scripted._llm = types.SimpleNamespace(apply_model=lambda function: [function(model)],
                                         reset_prefix_cache=lambda: True)
    return scripted


def test_a_publish_that_the_engine_breaks_off_is_a_failed_publish_and_says_why(engine):
    transport, source = VllmInplace(), ArraySource(expert_metas(), dict(OfExperts()))
    transport.open(engine)
    engine.llm.reset_prefix_cache = lambda: False
    with pytest.raises(PublishFailed, match="version 1 broke off: vLLM refused to reset") as e:
        transport.publish(source, 1)
    assert isinstance(e.value.__cause__, EngineUnhealthy) and e.value.next_step == "build a new engine"
    assert engine.weight_version() is None


def test_a_sleeping_engine_is_not_read(engine):
    transport, source = VllmInplace(), ArraySource(expert_metas(), dict(OfExperts()))
    transport.open(engine)
    receipt = transport.publish(source, 1)
    engine._asleep = True
    with pytest.raises(BridgeError, match="asleep") as e:
        transport.verify(receipt)
    assert not isinstance(e.value, PublishFailed)
    engine.drop("sleep() dropped its weights")
    with pytest.raises(PublishFailed, match="the receipt says"):
        transport.verify(receipt)


def test_a_closed_transport_holds_nothing_of_the_engine(engine):
    transport = VllmInplace()
    transport.open(engine)
    transport.publish(ArraySource(expert_metas(), dict(OfExperts())), 1)
    assert transport._spans
    transport.close()
    assert not any((transport._spans, transport.targets, transport._rows, transport._readers))


def test_experts_of_a_kernel_that_shuffles_them_are_refused_by_name(found):
    with pytest.raises(BridgeError,
                       match="FLASHINFER_CUTLASS.s layout of these is not known here .known: TRITON"):
        found(*experts("FLASHINFER_CUTLASS"))
    model, places = experts()
    with pytest.raises(BridgeError,
                       match=f"layer0.w2_weight cannot be written in place: {(E - 1) * D} of "
                             f"its {E * D} rows"):
        found(model, [p for p in places if not (p.leaf == "w2_weight" and p.expert == 1)])


def test_content_is_of_the_bytes_wherever_the_engine_holds_them(found):
    source, contents = ArraySource(expert_metas(), dict(OfExperts())), []
    for stacked in (True, False):
        transport = VllmInplace()
        transport.open(scripted_engine(found, stacked))
        contents.append(transport.publish(source, 1).content)
    assert contents[0] == contents[1] != ""


def test_a_stack_may_have_its_tensors_in_any_order(engine):
    """Experts before layers: the engine's rows are found by name."""

    class ExpertsFirst(OfExperts):
        def manifest(self):
            return expert_metas()

        def stacks(self, nbytes):
            for which, stack in self.stacks_of.items():
                names = tuple(f"model.layers.{i}.mlp.experts.{e}.{which}.weight" for e in range(E)
                              for i in range(LAYERS))
                yield [Rows(names, jnp.swapaxes(stack, 0, 1), 0, False)]

    transport = VllmInplace()
    transport.open(engine)
    transport.publish(ExpertsFirst(), 1)
    for name, array in OfExperts():
        np.testing.assert_array_equal(transport.targets[name].numpy(), array, err_msg=name)


@pytest.mark.parametrize("dtype", ["complex64", "bool", "int8", "float16"])
def test_a_type_that_the_manifest_does_not_say_is_named(engine, dtype):
    transport, metas = VllmInplace(), expert_metas()
    transport.open(engine)
    arrays = dict(OfExperts()) | {metas[3].name: jnp.zeros(metas[3].shape, dtype)}
    with pytest.raises(PublishFailed,
                       match=f"{metas[3].name}', '{dtype}', .*but its manifest says .*'float32'"):
        transport.publish(ArraySource(metas, arrays), 1)
    assert engine.weight_version() is None


@pytest.mark.parametrize("names, says",
                         [((), "did not give"), (("x",), "gives x, which its manifest does not list")])
def test_stacks_that_are_not_the_manifests_are_named(engine, names, says):
    class Other(OfExperts):
        def manifest(self):
            return expert_metas()

        def stacks(self, nbytes):
            return iter([[Rows((n,), jnp.zeros((F, D)), None, False)] for n in names])

    transport = VllmInplace()
    transport.open(engine)
    with pytest.raises(PublishFailed, match=says):
        transport.publish(Other(), 1)
