"""Writing in place without an engine: plain torch modules stand for vLLM's. The engine itself is in test_vllm.py."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridges.api import BridgeError, EngineUnhealthy, ParamMeta, PublishFailed, Rows, StackRow  # noqa: E402
from bridges.rollout import vllm_layout, vllm_params  # noqa: E402
from bridges.rollout.vllm_engine import VllmEngine  # noqa: E402
from bridges.rollout.vllm_layout import LiveRows  # noqa: E402
from bridges.rollout.vllm_params import Place  # noqa: E402
from bridges.rollout.vllm_stacks import stacks_of  # noqa: E402
from bridges.rollout.weight_state import WeightState  # noqa: E402
from bridges.weights import links  # noqa: E402
from bridges.weights.array_source import ArraySource  # noqa: E402
from bridges.weights.linked import LinkedWeights, _SentFromGpu, send  # noqa: E402
from bridges.weights.vllm_inplace import VllmInplace, _Reader  # noqa: E402
from jaxfp8rl.build import engine_runs, model_config  # noqa: E402
from jaxfp8rl.errors import ConfigError  # noqa: E402
from jaxfp8rl.registry import build_engine  # noqa: E402
from jaxfp8rl.toml_config import load_config  # noqa: E402

LAYERS, ROWS, COLUMNS = 6, 4, 32


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What other modules keep alive is not searched again at each of the collections below."""
    gc.freeze()
    yield
    gc.unfreeze()


class Fp8LinearMethod:
    """vLLM's by name: what decides about a layout are names of classes."""

    def __init__(self, kernel: str):
        self.fp8_linear = type(kernel, (), {})()


def fused(kernel: str = "CutlassFp8BlockScaledMMKernel") -> tuple[torch.nn.Module, list[Place]]:
    """A module whose weight [12, 32] E4M3 holds q (8 rows), k and v (2 rows each)."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(12, COLUMNS).to(torch.float8_e4m3fn), requires_grad=False)
    module.quant_method = Fp8LinearMethod(kernel)
    starts, sizes = {"q": 0, "k": 8, "v": 10}, {"q": 8, "k": 2, "v": 2}
    metas = {n: ParamMeta(f"layers.0.{n}_proj.weight", "float8_e4m3fn", (sizes[n], COLUMNS)) for n in starts}
    return module, [Place(metas[n], "layers.0.qkv_proj", module, "weight", starts[n], (12, COLUMNS)) for n in starts]


@pytest.fixture
def found(monkeypatch):
    """live_rows of a module, its places given."""

    def find(module: torch.nn.Module, places: list[Place]):
        monkeypatch.setattr(vllm_layout, "places", lambda model, block: places)
        return vllm_layout.live_rows(module, (128, 128))

    return find


def test_parts_of_a_fused_parameter_are_its_rows(found):
    module, places = fused()
    rows = found(module, places)
    for i, r in enumerate(rows):
        r.tensor.copy_(torch.full(r.meta.shape, float(i + 1)))
    assert module.weight.float()[:, 0].tolist() == [1.0] * 8 + [2.0] * 2 + [3.0] * 2
    assert not any(r.moved() for r in rows)
    module.weight.data = module.weight.data.clone()
    assert all(r.moved() for r in rows)


def other_dtype(module, places):
    module.weight.data = module.weight.data.to(torch.float8_e5m2)


def transposed(module, places):
    module.weight.data = torch.zeros(COLUMNS, 12).to(torch.float8_e4m3fn).t()


def padded(module, places):
    module.weight.data = torch.zeros(16, COLUMNS).to(torch.float8_e4m3fn)


def consumed(module, places):
    module.weight = None


def another_method(module, places):
    module.quant_method = types.SimpleNamespace()


@pytest.mark.parametrize(
    "spoil, says",
    [
        (other_dtype, r"\('float8_e5m2', \(12, 32\), True\)"), (transposed, r"\(12, 32\), False\)"),
        (padded, r"\(16, 32\), True\)"), (consumed, "has no weight any more"),
        (another_method, "how SimpleNamespace keeps it"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_a_layout_not_known_is_refused_by_name(found, spoil, says):
    module, places = fused()
    spoil(module, places)
    with pytest.raises(BridgeError, match=f"layers.0.q_proj.weight cannot be written in place: .*{says}") as e:
        found(module, places)
    assert "VllmReload" in e.value.next_step


def test_a_kernel_not_known_is_refused_by_name(found):
    with pytest.raises(BridgeError, match="how MarlinKernel keeps it is not known here .known: Cutlass"):
        found(*fused("MarlinKernel"))


def test_rows_that_no_tensor_of_the_checkpoint_fills_are_refused(found):
    module, places = fused()
    with pytest.raises(BridgeError, match="weight cannot be written in place: 10 of its 12 rows"):
        found(module, places[:2])
    module.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(BridgeError, match="extra cannot be written in place: 0 of its 3 rows"):
        found(module, places)


def test_digests_of_rows_are_read_from_the_parameter_itself(found):
    rows = found(*fused())
    reader = _Reader(stacks_of(rows))
    before = np.asarray(reader())
    rows[1].tensor.view(torch.uint8)[1, 3] = 1
    changed = (np.asarray(reader()) != before).any(1)
    assert dict(zip([r.meta.name for r in reader.rows], changed.tolist())) == {r.meta.name: i == 1 for i, r in enumerate(rows)}


class Made:
    """A source that makes a layer of two tensors when the first is asked for, and counts how many layers are alive."""

    def __init__(self):
        self.metas = tuple(ParamMeta(f"layers.{i}.{n}.weight", "float32", (ROWS, COLUMNS)) for i in range(LAYERS) for n in "ab")
        self.alive, self.most = [], 0

    def manifest(self):
        return self.metas

    def __iter__(self):
        for i, metas in enumerate(itertools.batched(self.metas, 2)):
            layer = [jnp.full((ROWS, COLUMNS), 10.0 * i + j) for j in range(2)]
            self.alive.append(weakref.ref(layer[0]))
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            for meta in metas:
                yield meta.name, layer.pop(0)


def bare_transport(metas, parameters=None) -> VllmInplace:
    """Each tensor a parameter by itself if none are given."""
    transport, parameters = VllmInplace(), parameters or [torch.zeros(m.shape) for m in metas]
    transport._rows = [LiveRows(m, None, p, 0, m.shape[0], p.data_ptr()) for m, p in zip(metas, parameters)]
    transport.targets = {r.meta.name: r.tensor for r in transport._rows}
    transport._place, transport._spans = {m.name: i for i, m in enumerate(metas)}, {}
    return transport


def test_of_what_a_source_makes_two_layers_are_alive():
    source = Made()
    transport = bare_transport(source.metas)
    transport._write(source, source.metas)()
    assert [int(t[0, 0]) for t in transport.targets.values()] == [10 * i + j for i in range(LAYERS) for j in range(2)]
    assert source.most == 2


def test_rows_of_a_stack_are_read_in_place_and_digested_as_tensors_are():
    metas, stack = Made().metas, jnp.arange(2.0 * LAYERS * ROWS * COLUMNS).reshape(2 * LAYERS, ROWS, COLUMNS)
    transport = bare_transport(metas)
    by_row = transport._write(zip((m.name for m in metas), (StackRow(stack, i) for i in range(len(metas)))), metas)()
    for i, target in enumerate(transport.targets.values()):
        np.testing.assert_array_equal(target.numpy(), stack[i])
    np.testing.assert_array_equal(by_row, transport._write(zip((m.name for m in metas), stack), metas)())
    np.testing.assert_array_equal(by_row, transport._write(list(transport.targets.items()), metas)())
    assert len({tuple(row) for row in by_row.tolist()}) == len(metas)


class Stacks(Made):
    """A source of two stacks: `a` is held, `b` is made in two parts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (jnp.arange(1.0 * LAYERS * ROWS * COLUMNS).reshape(LAYERS, ROWS, COLUMNS) + k for k in (0, 0.5))
        self.names = [[m.name for m in self.metas[k::2]] for k in range(2)]

    def stacks(self, nbytes):
        yield [Rows(tuple(self.names[0][2:]), self.a, 2, True)]
        yield [Rows(tuple(self.names[0][:2]), self.a, 0, True)]
        for at in (0, 3):
            made = self.b[at : at + 3] + 0
            self.alive.append(weakref.ref(made))
            yield [Rows(tuple(self.names[1][at : at + 3]), made, 0, False)]

    def __iter__(self):
        return iter([(name, stack[i]) for i in range(LAYERS) for (name, stack) in zip(self.metas_of(i), (self.a, self.b))])

    def metas_of(self, layer):
        return [m.name for m in self.metas[2 * layer : 2 * layer + 2]]


@pytest.mark.parametrize("engine", ["stacked", "stacked and fused", "apart"])
def test_a_source_by_stacks_arrives_as_one_by_layers_does(engine):
    """Layers of the engine are rows of one tensor, rows of a wider one, or tensors by themselves."""
    source = Stacks()
    wide = torch.full((LAYERS, 2 * ROWS, COLUMNS), -1.0)
    two = torch.zeros(2, LAYERS, ROWS, COLUMNS)
    parameters = {"stacked": [two[k, i] for i in range(LAYERS) for k in range(2)], "apart": None,
                  "stacked and fused": [p for p in wide for _ in range(2)]}[engine]  # fmt: skip
    transport = bare_transport(source.metas, parameters)
    if engine == "stacked and fused":
        transport._rows = [dataclasses.replace(r, start=k * ROWS, stop=(k + 1) * ROWS)
                           for i in range(LAYERS) for k, r in enumerate(transport._rows[2 * i : 2 * i + 2])]  # fmt: skip
        transport.targets = {r.meta.name: r.tensor for r in transport._rows}
    if engine != "apart":
        assert [len(rows) for rows in stacks_of(transport._rows)] == [LAYERS, LAYERS]
    by_stacks = transport._write(source, source.metas)()
    for name, want in source:
        np.testing.assert_array_equal(transport.targets[name].numpy(), want)
    np.testing.assert_array_equal(by_stacks, transport._write(list(source), source.metas)())
    readers = _Reader(stacks_of(transport._rows))
    read = dict(zip([r.meta.name for r in readers.rows], np.asarray(readers())[:, :2].tolist()))
    assert [read[m.name] for m in source.metas] == by_stacks.tolist()
    gc.collect()
    assert not any(ref() is not None for ref in source.alive)


class UnquantizedFusedMoEMethod:
    """vLLM's by name."""

    def __init__(self, kernel: str):
        self.unquantized_backend = types.SimpleNamespace(name=kernel)


E, F, D = 5, 4, 8
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}


def experts(kernel: str = "TRITON", stacked: bool = True) -> tuple[torch.nn.Module, list[Place]]:
    """LAYERS modules with the experts of a layer in w13_weight [E, 2F, D] and w2_weight [E, D, F], their layers in one tensor or
    not."""
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
                       for name, shape, start, expert in vllm_params._experts(path, leaf, size)]  # fmt: skip
    return model, places


class OfExperts:
    """A source of three stacks of experts [L, E, N, K]: gate's is held, the others are made in two parts."""

    def __init__(self):
        count = LAYERS * E * F * D
        self.stacks_of = {name: jnp.arange(k * count, (k + 1) * count, dtype=jnp.float32).reshape(LAYERS, E, *shape)
                          for k, (name, shape) in enumerate(SHAPES.items())}  # fmt: skip

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
                yield [Rows(self.names(which, range(at, at + 3)), self.stacks_of[which][at : at + 3] + 0, 0, False)]

    def __iter__(self):
        return iter([(f"model.layers.{i}.mlp.experts.{e}.{which}.weight", stack[i, e])
                     for i in range(LAYERS) for e in range(E) for which, stack in self.stacks_of.items()])  # fmt: skip


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
                 for i in range(LAYERS) for e in range(E) for which in SHAPES)  # fmt: skip


class ExpertsByLayer:
    """gate's experts are rows of the learner's stack of all layers; those of up are made a layer at a time, and counted."""

    def __init__(self):
        self.whole, self.alive, self.most = OfExperts().stacks_of, [], 0

    def __iter__(self):
        for i in range(LAYERS):
            made = self.whole["up_proj"][i] + 0
            self.alive.append(weakref.ref(made))
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            for e in range(E):
                rows = StackRow(self.whole["gate_proj"], (i, e)), StackRow(made, e), StackRow(self.whole["down_proj"], (i, e))
                yield from ((f"model.layers.{i}.mlp.experts.{e}.{which}.weight", row) for which, row in zip(SHAPES, rows))
            del made, rows


def test_experts_a_layer_at_a_time_arrive_and_those_that_were_made_are_let_go(found):
    """As they go over a link between GPUs, and into an engine of this process."""
    source, (model, places), metas = ExpertsByLayer(), experts(), expert_metas()
    want = {name: np.asarray(array) for name, array in OfExperts()}
    gpu = _SentFromGpu(metas)
    for meta, data in zip(metas, gpu.read(source), strict=True):
        np.testing.assert_array_equal(data.numpy().view(np.float32).reshape(meta.shape), want[meta.name])
    del data
    assert source.most == 2
    transport, source = VllmInplace(), ExpertsByLayer()
    transport._rows = found(model, places)
    transport.targets = {r.meta.name: r.tensor for r in transport._rows}
    transport._place = {name: i for i, name in enumerate(transport.targets)}
    np.testing.assert_array_equal(transport._write(source, metas)()[[transport._place[m.name] for m in metas]], gpu.digests())
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
    scripted._state, scripted._sick, scripted._broken, scripted._asleep, scripted._cache_asleep = WeightState(), "", *[False] * 3
    scripted._manifest, scripted.kv_scale_places = expert_metas(), ()
    scripted.llm = types.SimpleNamespace(apply_model=lambda function: [function(model)], reset_prefix_cache=lambda: True)
    return scripted


def test_another_process_publishes_over_a_link(engine, tmp_path):
    """And what is changed on the way is found by the digests of its tensors."""
    transport, ends, metas = VllmInplace(), [], expert_metas()
    transport.open(engine)
    assert transport.links == links.HOST_LINKS

    def accept(said):
        ends.append(links.accept(said, tmp_path))

    sender = links.connect("shared_memory", tmp_path, len(metas), 512, 5.0, accept)
    arrays = {name: array + 1 for name, array in OfExperts()}

    def publish(version):
        sender.mailbox.clear()
        until = time.monotonic() + 5
        args = sender, ArraySource(metas, arrays), metas, until, lambda: None
        thread = threading.Thread(target=send, args=args)
        thread.start()
        try:
            return transport.publish(LinkedWeights(ends[0], metas, until), version)
        finally:
            thread.join()

    receipt = publish(1)
    transport.verify(receipt)
    for name, target in transport.targets.items():
        np.testing.assert_array_equal(target.numpy(), arrays[name])
    assert (engine.weight_version(), receipt.tensors) == (1, len(metas))
    assert transport.publish(ArraySource(metas, arrays), 1).content == receipt.content, "as from this process"
    pieces = ends[0].pieces

    def flipped(*args):
        for piece, data in pieces(*args):
            data[3] ^= piece.name == metas[7].name
            yield piece, data

    ends[0].pieces = flipped
    with pytest.raises(PublishFailed, match=f"1 of {len(metas)} tensors of the engine differ from what was sent, first"):
        publish(2)
    assert engine.weight_version() is None


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
    with pytest.raises(BridgeError, match="how FLASHINFER_CUTLASS keeps those is not known here .known: TRITON"):
        found(*experts("FLASHINFER_CUTLASS"))
    model, places = experts()
    with pytest.raises(BridgeError, match=f"layer0.w2_weight cannot be written in place: {(E - 1) * D} of its {E * D} rows"):
        found(model, [p for p in places if not (p.leaf == "w2_weight" and p.expert == 1)])


def test_a_source_by_stacks_that_leaves_a_tensor_out_is_refused():
    source = Stacks()
    source.names[0].pop(3)
    with pytest.raises(ValueError, match="did not give layers.3.a.weight"):
        bare_transport(source.metas)._write(source, source.metas)()


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
                names = tuple(f"model.layers.{i}.mlp.experts.{e}.{which}.weight" for e in range(E) for i in range(LAYERS))
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
    with pytest.raises(PublishFailed, match=f"{metas[3].name}', '{dtype}', .*where its manifest says .*'float32'"):
        transport.publish(ArraySource(metas, arrays), 1)
    assert engine.weight_version() is None


@pytest.mark.parametrize("names, says", [((), "did not give"), (("x",), "gives x, which its manifest does not list")])
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


def test_one_row_under_many_names_is_refused():
    """Torch would write it to all of them, and the proof would find what was sent."""
    source, two = Stacks(), torch.zeros(2, LAYERS, ROWS, COLUMNS)
    source.a = source.a[:1]
    source.stacks = lambda nbytes: iter([[Rows(tuple(source.names[0]), source.a, 0, True)]])
    transport = bare_transport(source.metas, [two[k, i] for i in range(LAYERS) for k in range(2)])
    with pytest.raises(ValueError, match=f"1 rows for {LAYERS} tensors, first layers.0.a.weight"):
        transport._write(source, source.metas)
    assert not two.any()


def test_a_stack_row_passes_for_an_array_anywhere():
    stack = jnp.arange(24.0).reshape(2, 3, 4)
    row = StackRow(stack, 1)
    assert (row.shape, row.dtype, row.nbytes) == ((3, 4), stack.dtype, 48)
    np.testing.assert_array_equal(row, stack[1])
    np.testing.assert_array_equal(jax.dlpack.from_dlpack(row), stack[1])
    np.testing.assert_array_equal(torch.from_dlpack(row).numpy(), stack[1])


def test_a_way_into_vllm_is_refused_for_the_embedded_engine():
    cfg = load_config("demo", ["--rollout.publish", "in_place"]).check()
    model = model_config(cfg)
    with pytest.raises(ConfigError, match='rollout.publish = "in_place" is a way into vLLM'):
        build_engine(cfg, model, engine_runs(cfg, model))
