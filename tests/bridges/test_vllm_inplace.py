"""Writing in place without an engine: plain torch modules stand for vLLM's. The engine itself is in
test_vllm.py."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridges.api import BridgeError, ParamMeta, Rows, StackRow  # noqa: E402
from bridges.inside_vllm.layout import LiveRows  # noqa: E402
from bridges.inside_vllm.params import Place  # noqa: E402
from bridges.inside_vllm.stacks import stacks_of  # noqa: E402
from bridges.transports.vllm_inplace import VllmInplace, _Reader  # noqa: E402
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config  # noqa: E402
from jaxfp8rl.errors import ConfigError  # noqa: E402
from jaxfp8rl.rollout.engines import check_engine_settings  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_collections")
LAYERS, ROWS, COLUMNS = 6, 4, 32


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
    return module, [Place(metas[n], "layers.0.qkv_proj", module, "weight", starts[n], (12, COLUMNS))
                    for n in starts]


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
        (another_method, "the layout of SimpleNamespace"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_layout_not_known_is_refused_by_name(found, spoil, says):
    module, places = fused()
    spoil(module, places)
    with pytest.raises(BridgeError,
                       match=f"layers.0.q_proj.weight cannot be written in place: .*{says}") as e:
        found(module, places)
    assert "VllmReload" in e.value.next_step


def test_a_kernel_not_known_is_refused_by_name(found):
    with pytest.raises(BridgeError, match="the layout of MarlinKernel is not known here .known: Cutlass"):
        found(*fused("MarlinKernel"))


def test_rows_that_no_tensor_of_the_checkpoint_fills_are_refused(found):
    module, places = fused()
    with pytest.raises(BridgeError, match="weight cannot be written in place: 10 of its 12 rows"):
        found(module, places[:2])
    module.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(BridgeError, match="extra cannot be written in place: 0 of its 3 rows"):
        found(module, places)


def test_scales_of_attention_need_not_be_in_a_checkpoint(found):
    """vLLM 0.25 keeps k_zero_point [1] and others of compressed-tensors."""
    module, places = fused()
    module.attn = torch.nn.Module()
    module.attn.k_zero_point = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(BridgeError, match="attn.k_zero_point cannot be written in place: 0 of its 1 rows"):
        found(module, places)
    module.attn._k_scale = torch.ones(1)  # vLLM's mark of an attention
    assert len(found(module, places)) == 3


def test_digests_of_rows_are_read_from_the_parameter_itself(found):
    rows = found(*fused())
    reader = _Reader(stacks_of(rows))
    before = np.asarray(reader())
    rows[1].tensor.view(torch.uint8)[1, 3] = 1
    changed = (np.asarray(reader()) != before).any(1)
    assert dict(zip([r.meta.name for r in reader.rows],
                    changed.tolist())) == {r.meta.name: i == 1 for i, r in enumerate(rows)}


class Made:
    """A source that makes a layer of two tensors when the first is asked for, and counts how many layers are
    alive."""

    def __init__(self):
        self.metas = tuple(ParamMeta(f"layers.{i}.{n}.weight", "float32", (ROWS, COLUMNS))
                           for i in range(LAYERS) for n in "ab")
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
    assert [int(t[0, 0])
            for t in transport.targets.values()] == [10 * i + j for i in range(LAYERS) for j in range(2)]
    assert source.most == 2


def test_rows_of_a_stack_are_read_in_place_and_digested_as_tensors_are():
    metas, stack = Made().metas, jnp.arange(2.0 * LAYERS * ROWS * COLUMNS).reshape(2 * LAYERS, ROWS, COLUMNS)
    transport = bare_transport(metas)
    by_row = transport._write(zip((m.name for m in metas), (StackRow(stack, i) for i in range(len(metas)))),
                              metas)()
    for i, target in enumerate(transport.targets.values()):
        np.testing.assert_array_equal(target.numpy(), stack[i])
    np.testing.assert_array_equal(by_row, transport._write(zip((m.name for m in metas), stack), metas)())
    np.testing.assert_array_equal(by_row, transport._write(list(transport.targets.items()), metas)())
    assert len({tuple(row) for row in by_row.tolist()}) == len(metas)


class Stacks(Made):
    """A source of two stacks: `a` is held, `b` is made in two parts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (jnp.arange(1.0 * LAYERS * ROWS * COLUMNS).reshape(LAYERS, ROWS, COLUMNS) + k
                          for k in (0, 0.5))
        self.names = [[m.name for m in self.metas[k::2]] for k in range(2)]

    def stacks(self, nbytes):
        yield [Rows(tuple(self.names[0][2:]), self.a, 2, True)]
        yield [Rows(tuple(self.names[0][:2]), self.a, 0, True)]
        for at in (0, 3):
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            yield [Rows(tuple(self.names[1][at : at + 3]), self._made(at), 0, False)]

    def _made(self, at):
        made = self.b[at : at + 3] + 0
        self.alive.append(weakref.ref(made))
        return made

    def __iter__(self):
        return iter([(name, stack[i]) for i in range(LAYERS)
                     for (name, stack) in zip(self.metas_of(i), (self.a, self.b))])

    def metas_of(self, layer):
        return [m.name for m in self.metas[2 * layer : 2 * layer + 2]]


@pytest.mark.parametrize("engine", ["stacked", "stacked and fused", "apart"])
def test_a_source_by_stacks_arrives_as_one_by_layers_does(engine):
    """Layers of the engine are rows of one tensor, rows of a wider one, or tensors by themselves."""
    source = Stacks()
    wide = torch.full((LAYERS, 2 * ROWS, COLUMNS), -1.0)
    two = torch.zeros(2, LAYERS, ROWS, COLUMNS)
    parameters = {"stacked": [two[k, i] for i in range(LAYERS) for k in range(2)], "apart": None,
                  "stacked and fused": [p for p in wide for _ in range(2)]}[engine]
    transport = bare_transport(source.metas, parameters)
    if engine == "stacked and fused":
        transport._rows = [dataclasses.replace(r, start=k * ROWS, stop=(k + 1) * ROWS)
                           for i in range(LAYERS) for k, r in enumerate(transport._rows[2 * i : 2 * i + 2])]
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
    assert (len(source.alive), source.most) == (2, 0), "a part is let go before the next is made"


def test_a_source_by_stacks_that_leaves_a_tensor_out_is_refused():
    source = Stacks()
    source.names[0].pop(3)
    with pytest.raises(ValueError, match="did not give layers.3.a.weight"):
        bare_transport(source.metas)._write(source, source.metas)()


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
    cfg = check(load_config("demo", ["--rollout.publish", "in_place"]))
    with pytest.raises(ConfigError, match='rollout.publish = "in_place" is for vLLM'):
        check_engine_settings(cfg)
