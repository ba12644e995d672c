"""What crosses the seam is what the learner computes with: names, order, and every byte."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import StackRow
from bridges.proof import manifest
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import get_param, param_table
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.publish import wire as publish
from jaxfp8rl.publish.wire import LearnerWeights, assemble, is_fp8, wire_manifest

pytestmark = pytest.mark.usefixtures("quick_compile")

ALL = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
RUNS = (LayerRun(0, 1, frozenset()), LayerRun(1, 3, ALL), LayerRun(3, 4, ALL - {"o_proj"}))


def model(tied: bool) -> ModelConfig:
    return ModelConfig.from_hf(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 48, "hidden_size": 128,
         "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "hidden_act": "silu",
         "tie_word_embeddings": tied}
    )


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda p: p * jnp.exp(jax.random.normal(jax.random.key(1), p.shape)),
                        init_params(model(False), jax.random.key(0)))


@pytest.fixture(scope="module")
def wire(params):
    return arrays(LearnerWeights(model(False), policy_of(params, Precision(RUNS)), RUNS, "bfloat16"))


def arrays(source) -> dict[str, jax.Array]:
    return {name: jnp.from_dlpack(buffer) for name, buffer in source}


def test_a_policy_is_lasting_if_nothing_has_to_be_made(params):
    policy = policy_of(params, Precision(RUNS))
    assert LearnerWeights(model(False), policy, RUNS, "bfloat16").lasting
    masters = params | {"layers": (params["layers"],)}
    assert not LearnerWeights(model(False), masters, RUNS, "bfloat16").lasting, "codes are made"
    assert not LearnerWeights(model(False), policy, RUNS, "float32").lasting, "other numbers are made"


def test_the_manifest_lists_hf_names_in_order_each_fp8_weight_before_its_scales():
    names = [m.name for m in wire_manifest(model(False), RUNS, "bfloat16")]
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    first = [n.removeprefix("model.layers.0.") for n in names if n.startswith("model.layers.0.")]
    assert first == [
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    ]
    second = [n.removeprefix("model.layers.1.") for n in names if n.startswith("model.layers.1.")]
    scaled = [n for m in first for n in ([m, m + "_scale_inv"] if "proj" in m else [m])]
    assert second == scaled
    assert not any("layers.3.self_attn.o_proj.weight_scale_inv" in n for n in names)
    assert "lm_head.weight" not in [m.name for m in wire_manifest(model(True), RUNS, "bfloat16")]


def test_the_manifest_tells_dtype_shape_role_and_block():
    metas = {m.name: m for m in wire_manifest(model(False), RUNS, "bfloat16")}
    gate, scale = (metas[f"model.layers.1.mlp.gate_proj.weight{s}"] for s in ("", "_scale_inv"))
    assert (gate.dtype, gate.shape, gate.role,
            gate.block) == ("float8_e4m3fn", (256, 128), "weight", (128, 128))
    assert (scale.dtype, scale.shape, scale.role,
            scale.block) == ("float32", (2, 1), "block_scale", (128, 128))
    plain = metas["model.layers.0.mlp.gate_proj.weight"]
    assert (plain.dtype, plain.shape, plain.block) == ("bfloat16", (256, 128), None)
    assert {m.dtype for m in wire_manifest(model(False), (LayerRun(0, 4, frozenset()),),
                                           "float32")} == {"float32"}


def test_the_buffers_are_those_of_the_manifest(params, wire):
    source = LearnerWeights(model(False), policy_of(params, Precision(RUNS)), RUNS, "bfloat16")
    metas = source.manifest()
    assert [n for n, _ in source] == [m.name for m in metas]
    for m in metas:
        assert (str(wire[m.name].dtype), wire[m.name].shape) == (m.dtype, m.shape)
    assert sum(b.nbytes for b in wire.values()) == manifest.nbytes(metas)


def test_every_byte_is_the_quantised_bf16_rounding_of_the_master(params, wire):
    for e in param_table(model(False)):
        master = jnp.asarray(get_param(params, e)).astype(jnp.bfloat16)
        if is_fp8(e, RUNS):
            codes, scale = QuantizedWeight.of(master)
            np.testing.assert_array_equal(np.asarray(wire[e.hf_name]).view(np.uint8),
                                          np.asarray(codes).view(np.uint8))
            np.testing.assert_array_equal(wire[e.hf_name + "_scale_inv"], scale)
        else:
            np.testing.assert_array_equal(np.asarray(wire[e.hf_name]).view(np.uint16),
                                          np.asarray(master).view(np.uint16))


def test_the_codes_are_not_those_of_the_unrounded_master(params, wire):
    """So the test above can tell: without the rounding to bfloat16 some codes are others."""
    entry = next(e for e in param_table(model(False)) if is_fp8(e, RUNS))
    codes, _ = QuantizedWeight.of(get_param(params, entry))
    assert (np.asarray(codes).view(np.uint8) != np.asarray(wire[entry.hf_name]).view(np.uint8)).any()


def test_assemble_gives_back_the_published_leaves_one_stack_a_run(wire):
    tree = assemble(model(False), RUNS, wire)
    q = [stack["self_attn"]["o_proj"]["weight"] for stack in tree["layers"]]
    assert [isinstance(w, QuantizedWeight) for w in q] == [False, True, False]
    for i, layer in enumerate((1, 2)):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        np.testing.assert_array_equal(np.asarray(q[1].codes[i]).view(np.uint8),
                                      np.asarray(wire[name]).view(np.uint8))
        np.testing.assert_array_equal(q[1].scale[i], wire[name + "_scale_inv"])
    np.testing.assert_array_equal(tree["lm_head"]["weight"], wire["lm_head.weight"])


def test_a_forward_on_the_published_bytes_is_the_learners_forward_bit_for_bit(params, wire):
    precision = Precision(RUNS, compute_dtype="float32")
    tokens = jnp.arange(24).reshape(2, 12)
    args = model(False), tokens, jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones_like(tokens), precision
    run = jax.jit(forward, static_argnums=(1, 5))
    np.testing.assert_array_equal(run(assemble(model(False), RUNS, wire), *args),
                                  run(policy_of(params, precision), *args))


def test_an_engine_in_fp8_gets_the_same_bytes_from_a_learner_without(params, wire):
    """Recipe fp8_rollout: the policy holds nothing quantised, so the publish quantises."""
    plain = policy_of(params, Precision.uniform(4, "bfloat16"))
    for name, buffer in LearnerWeights(model(False), plain, RUNS, "bfloat16"):
        np.testing.assert_array_equal(np.asarray(buffer).view(np.uint8),
                                      np.asarray(wire[name]).view(np.uint8))


def test_the_policys_codes_are_the_published_ones(params, wire):
    policy = policy_of(params, Precision(RUNS))
    for e in param_table(model(False)):
        if is_fp8(e, RUNS):
            held = get_param(policy, e)
            np.testing.assert_array_equal(np.asarray(held.codes).view(np.uint8),
                                          np.asarray(wire[e.hf_name]).view(np.uint8))
            np.testing.assert_array_equal(held.scale, wire[e.hf_name + "_scale_inv"])


def test_what_the_policy_holds_as_it_crosses_is_given_out_where_it_lies(params):
    policy = policy_of(params, Precision(RUNS))
    held = {id(leaf) for leaf in jax.tree.leaves(policy)}
    for name, buffer in LearnerWeights(model(False), policy, RUNS, "bfloat16"):
        if policy["norm"]["weight"].dtype == "bfloat16" or "proj" in name:
            assert id(buffer.stack if isinstance(buffer, StackRow) else buffer) in held, name


def by_stacks(policy, runs, nbytes):
    """name -> its array, and the parts that came."""
    parts = list(LearnerWeights(model(False), policy, runs, "bfloat16").stacks(nbytes))
    return {name: rows.stack if rows.first is None else rows.stack[rows.first + i]
            for part in parts for rows in part for i, name in enumerate(rows.names)}, parts


@pytest.mark.parametrize("policy", ["fp8_unified", "fp8_rollout", "masters"])
def test_by_stacks_the_same_tensors_come(params, wire, policy):
    """Held where the policy holds them as they cross, made in parts where not."""
    plain = lambda: policy_of(params, Precision.uniform(4, "bfloat16"))  # noqa: E731
    policy = {"fp8_unified": lambda: policy_of(params, Precision(RUNS)), "fp8_rollout": plain,
              "masters": lambda: {**params, "layers": (params["layers"],)}}[policy]()
    for nbytes in (1, 2**30):
        came, _ = by_stacks(policy, RUNS, nbytes)
        assert came.keys() == wire.keys()
        for name, array in came.items():
            np.testing.assert_array_equal(np.asarray(array).view(np.uint8),
                                          np.asarray(wire[name]).view(np.uint8), err_msg=name)


def test_what_is_made_comes_in_parts_as_equal_as_can_be_by_two_programs(params):
    plain, runs = policy_of(params, Precision.uniform(4, "bfloat16")), (LayerRun(0, 4, ALL),)
    before = publish._made._cache_size()
    _, parts = by_stacks(plain, runs, 3 * 256 * 128)  # three layers of gate_proj
    made = [part for part in parts if len(part) == 2]
    assert not any(rows.held for part in made for rows in part)
    assert [len(rows.names) for rows, _ in made if "gate_proj" in rows.names[0]] == [2, 2]
    assert [len(rows.names) for rows, _ in made if "k_proj" in rows.names[0]] == [4]
    assert publish._made._cache_size() <= before + 7
    held = [rows for part in parts for rows in part if rows.held]
    assert all(any(rows.stack is leaf for leaf in jax.tree.leaves(plain)) for rows in held)


def test_nothing_is_left_of_a_part_when_the_next_is_made(params, monkeypatch):
    """Whoever lets go of each has one in memory at a time."""
    made, left, make = [], [], publish._made

    def counted(*args):
        left.append(sum(ref() is not None for ref in made))
        stack = make(*args)
        made.append(weakref.ref(jax.tree.leaves(stack)[0]))
        return stack

    monkeypatch.setattr(publish, "_made", counted)
    plain = policy_of(params, Precision.uniform(4, "bfloat16"))
    for part in LearnerWeights(model(False), plain, (LayerRun(0, 4, ALL),), "bfloat16").stacks(256 * 128):
        part.clear()
    assert len(left) > 8 and not any(left)


def test_a_layer_is_made_when_its_first_tensor_is_asked_for(params, monkeypatch):
    """And by one program for all layers of a stack."""
    made, make = [], publish._made_layer
    monkeypatch.setattr(publish, "_made_layer",
                        lambda *args: made.append(int(*set(map(int, args[1].values())))) or make(*args))
    plain, before = policy_of(params, Precision.uniform(4, "bfloat16")), make._cache_size()
    for name, _ in LearnerWeights(model(False), plain, RUNS[1:2] + (LayerRun(3, 4, ALL),), "bfloat16"):
        if name.startswith("model.layers."):
            layer = int(name.split(".")[2])
            assert made == [i for i in (1, 2, 3) if i <= layer], name
    assert make._cache_size() <= before + 1


def test_masters_give_the_same_bytes_as_the_policy_made_of_them(params, wire):
    """What rollout.one_copy publishes."""
    for name, buffer in LearnerWeights(model(False), {**params, "layers": (params["layers"],)}, RUNS,
                                       "bfloat16"):
        np.testing.assert_array_equal(np.asarray(buffer).view(np.uint8),
                                      np.asarray(wire[name]).view(np.uint8), err_msg=name)
