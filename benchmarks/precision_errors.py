"""The cost of each format on real data: errors of a layer's products against float64, and of a whole update's
gradient.

    jaxfp8rl bench precision_errors [--smollm2 models/smollm2-135m]

Two minutes on two CPU cores without SmolLM2. The data come from a Qwen3-shaped model that is a little wider
than the demo's, after a part of the demo's warm start, on its own task with advantages of +1 and -1: every
linear of its last layer with its input activation and its output gradient. SmolLM2: the same on text, in a
middle layer.

Errors are relative, ||got - exact|| / ||exact||. The products run in float32, as on any machine without FP8
tensor cores, so that an error consists only of rounding to the format. The yardstick of each row is BF16 on
the same data.

Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.hf_names import get_param, linear_shapes, param_table
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.transformer import embed, final_norm, head_weight, packed_attention
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.probes.probes import precision_report, unquantized_policy
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.training.step import make_logprobs, make_policy, make_train_step
from jaxfp8rl.training.warm_start import warm_start
from jaxfp8rl.types import Params, TrainBatch
from pallas_kernels.blockwise_matmul.reference import blockwise_matmul, wgrad
from pallas_kernels.numerics import cosine, relative_l2
from pallas_kernels.quantize import reference as q

ROOT = Path(__file__).parent.parent
FP8 = {"gradients": "e4m3", "compute_dtype": "float32"}
VARIANTS = {  # fields of Precision; all linears are FP8 except in bf16
    "bf16": {"compute_dtype": "bfloat16"},
    "fp8_forward": FP8 | {"gradients": "high"},
    "fp8_unified": FP8,
    "fp8_unified, activations in high precision (W8A16)": FP8 | {"activations_fp8": False},
    "fp8_unified, gradients E5M2": FP8 | {"gradients": "e5m2"},
    "fp8_unified, saved activations FP8 (Jet-RL)": FP8 | {"saved_activations": "fp8"},
    "fp8_unified, wgrad's inputs in 128x128": FP8 | {"wgrad_inputs": "128x128"},
}
POWERS_OF_TWO = "fp8_unified, scales powers of two"
YARDSTICK = "bf16 on the same data"
KEEP = optax.GradientTransformation(  # changes nothing and leaves the gradients in opt_state
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, _, __: (jax.tree.map(jnp.zeros_like, grads), grads)
)


class Subject(NamedTuple):
    """A model, its float32 masters, a packed batch [M, R, T] and the layer to examine."""

    name: str
    model: ModelConfig
    params: Params
    batch: TrainBatch
    layer: int


def main() -> None:
    parser = arguments(__doc__, "precision_errors")
    parser.add_argument("--smollm2", help="HF folder of SmolLM2-135M-Instruct, for a second subject")
    args = parser.parse_args()
    rows, linears, probes = [], {}, {}
    for subject in [demo(), *([smollm2(args.smollm2)] if args.smollm2 else [])]:
        found = layer_errors(subject)
        linears[subject.name] = found
        probes[subject.name] = probed(subject)
        rows += [*layer_rows(subject.name, found), *gradient_rows(subject)]
        write(args.out, "precision_errors", rows, args.plot, linears=linears, probes=probes)


# Subjects
# ------------------------------------------------------------------------------------------------------------


def demo(steps: int = 100, seed: int = 0) -> Subject:
    """A model twice as wide as the demo's after `steps` of its warm start; the batch has 64 of the task's own
    answers."""
    wider = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    overrides = [w for k, v in wider.items() for w in (f"--model.config.{k}", str(v))]
    cfg = load_config("demo", [*overrides, "--precision.recipe", "bf16", "--sft.steps", str(steps),
                               "--run.seed", str(seed)])
    model, data = model_config(cfg), load_data(cfg, model_config(cfg))
    params, _ = warm_start(cfg, model, starting_params(cfg, model), (data.task, data.train, data.tokenizer),
                           lambda _: None, lambda _: None)
    rng = np.random.default_rng(0)
    samples = []
    for p in data.train[:64]:
        answer = data.tokenizer.encode(data.task.demonstrate(p.problem, rng), add_special_tokens=False)
        samples.append(sample(p.token_ids, answer, rng))
    return Subject("demo model" + f", seed {seed}" * bool(seed), model, params, packed(samples, 60),
                   model.num_hidden_layers - 1)


def smollm2(folder: str) -> Subject:
    """The first 512 tokens of docs/corrections.md in pieces of 128, with the second half of each as the
    response."""
    model, params = load_params(folder)
    text = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
    tokens = load_tokenizer(folder).encode(text, add_special_tokens=False)[:512]
    rng = np.random.default_rng(0)
    samples = [sample(tokens[i : i + 64], tokens[i + 64 : i + 128], rng) for i in range(0, 512, 128)]
    return Subject("SmolLM2-135M", model, jax.tree.map(jnp.asarray, params), packed(samples, 256),
                   model.num_hidden_layers // 2)


def sample(prompt, completion, rng: np.random.Generator) -> Sample:
    return Sample(prompt, completion, np.zeros(len(completion), np.float32), float(rng.choice([-1, 1])))


def packed(samples: list[Sample], row_tokens: int) -> TrainBatch:
    """All samples in one micro-batch, as in wgrad, whose blocks run along the tokens of a micro-batch."""
    longest = max(len(s.prompt) + len(s.completion) for s in samples)
    rows = microbatches_needed(len(samples), longest, row_tokens, 1)
    return pack(samples, row_tokens, rows, 1)


# One layer's products
# ----------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """The input x [T, K], the weight w [N, K], and the output gradient dy [T, N]; float32, w with BF16
    values."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array


def products(subject: Subject) -> dict[str, Product]:
    """Every linear of the subject's layer, in a float32 forward and backward pass of the policy-gradient
    loss."""
    model, micro = subject.model, jax.tree.map(lambda a: a[0], subject.batch)
    precision = Precision.uniform(model.num_hidden_layers)
    policy, run = unquantized_policy(subject.params, precision), precision.runs[0]
    shapes = {name.split(".")[-1]: n for name, (n, _) in linear_shapes(model).items()}
    taps = {name: jnp.zeros((*micro.tokens.shape, n)) for name, n in shapes.items()}

    def loss(taps: dict) -> tuple[jax.Array, dict]:
        rope, attend = packed_attention(micro.positions, micro.segment_ids, model, precision)()

        def body(x, step):
            w, index = step
            seen = {}

            def product(name, x, *rest):
                seen[name] = x
                return linear(x, *rest) + jnp.where(index == subject.layer, taps[name], 0)

            return DecoderLayer(model, precision, run, rope, attend, product)(x, w)[0], seen

        steps = policy["layers"], jnp.arange(model.num_hidden_layers)
        x, seen = jax.lax.scan(jax.checkpoint(body), embed(policy, micro.tokens, model, precision), steps)
        hidden = final_norm(x, policy, model, precision)
        logp, _ = token_logprobs(hidden, head_weight(policy, model), micro.tokens,
                                 softcap=model.final_logit_softcapping)
        return -jnp.sum(jnp.where(micro.response_mask, micro.advantages * logp,
                                  0)) / jnp.sum(micro.response_mask), seen

    dy, x = rounding_exact_jit(jax.grad(loss, has_aux=True))(taps)
    found = {}
    for module in linear_shapes(model):
        block, name = module.split(".")
        flat = (a.reshape(-1, a.shape[-1]) for a in (x[name][subject.layer], dy[name]))
        found[name] = Product(next(flat), policy["layers"][block][name]["weight"][subject.layer], next(flat))
    return found


@functools.partial(rounding_exact_jit, static_argnums=0)
def through_linear(precision: Precision, p: Product) -> tuple:
    """(y, dx, dw) as the learner computes them."""
    dtype = precision.compute_dtype
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision, precision.any_fp8), p.x.astype(dtype),
                      p.w.astype(dtype))
    return y, *pull(p.dy.astype(y.dtype))


@rounding_exact_jit
def through_powers_of_two(p: Product) -> tuple:
    """(y, dx, dw) with every scale rounded up to a power of two."""
    codes, scale = q.quantize_blocks(p.w, power_of_two=True)
    rows = functools.partial(q.quantize_rows, power_of_two=True)
    tokens = functools.partial(q.quantize_tokens, power_of_two=True)
    dx = blockwise_matmul(*rows(p.dy), codes.T, scale.T)
    return blockwise_matmul(*rows(p.x), codes, scale), dx, wgrad(*tokens(p.dy), *tokens(p.x))


def layer_errors(subject: Subject) -> dict[str, dict[str, dict[str, list[float]]]]:
    """variant -> linear -> {"error", "cosine"} of [forward, dgrad, wgrad] against float64."""
    ways: dict[str, Callable] = {v: functools.partial(through_linear, variant(1, fields))
                                 for v, fields in VARIANTS.items()}
    ways[POWERS_OF_TWO] = through_powers_of_two
    found = {name: {} for name in ways}
    for linear_name, p in products(subject).items():
        x, w, dy = (np.asarray(a, np.float64) for a in p)
        exact = x @ w.T, dy @ w, dy.T @ x
        for name, way in ways.items():
            got = [np.asarray(a, np.float64) for a in way(p)]
            found[name][linear_name] = {
                "error": [relative_l2(g, e) for g, e in zip(got, exact)],
                "cosine": [cosine(g, e) for g, e in zip(got, exact)],
            }
    return found


def layer_rows(subject: str, found: dict) -> list[dict]:
    """Rows for a layer's linears: the mean error of each product; the mean and the worst cosine of their 14
    gradients."""
    rows = []
    for name, linears in found.items():
        case = f"{subject}, one layer: {name}"
        for i, product in enumerate(("forward", "dgrad", "wgrad")):
            mean, base = (np.mean([v["error"][i] for v in f.values()]) for f in (linears, found["bf16"]))
            rows.append(row(case, f"{product}, relative error", "", float(mean), float(base), YARDSTICK,
                            True))
        for metric, pick in (("mean", np.mean), ("worst", np.min)):
            ours, base = (float(pick([v["cosine"][1:] for v in f.values()]))
                          for f in (linears, found["bf16"]))
            rows.append(row(case, f"1 - cosine, {metric} gradient", "", 1 - ours, 1 - base, YARDSTICK, True))
    return rows


# A whole update
# ----------------------------------------------------------------------------------------------------------


def gradients(subject: Subject, precision: Precision) -> dict[str, np.ndarray]:
    """HF name -> gradient, float64, from the train step itself under plain REINFORCE, which has no ratio and
    no correction."""
    logprobs = make_logprobs(subject.model, precision, 1.0,
                             remat="layer" if subject.model.num_hidden_layers > 8 else "none")
    params = jax.tree.map(jnp.copy, subject.params)  # the step donates its state
    policy = make_policy(precision)(params)
    step = make_train_step(logprobs, precision, Loss(objective="reinforce"), CorrectionConfig(), KEEP)
    state = init_state(params, KEEP, precision.compute_dtype)
    state, _, metrics = step(state, policy, subject.batch, subject.batch.rollout_logp)
    assert metrics["update/applied"] == 1
    return {e.hf_name: np.asarray(get_param(state.opt_state, e), np.float64)
            for e in param_table(subject.model)}


def gradient_rows(subject: Subject) -> Iterator[dict]:
    """1 - cosine with the float32 gradient: of all parameters as one vector, and of the worst single
    linear."""
    layers = subject.model.num_hidden_layers
    exact = gradients(subject, Precision.uniform(layers))
    ways = VARIANTS | {"fp8_unified, FP8 keys and values": FP8 | {"kv": KvFormat(fp8=True)}}
    linears = [e.hf_name for e in param_table(subject.model) if e.role.kind == "linear"]
    base = None  # that of bf16, which comes first
    for name, fields in ways.items():
        got = gradients(subject, variant(layers, fields))
        whole = cosine(*(np.concatenate([g[n].ravel() for n in exact]) for g in (got, exact)))
        off = {"whole gradient": 1 - whole,
               "worst linear": 1 - min(cosine(got[n], exact[n]) for n in linears)}
        base = base or off
        for metric, ours in off.items():
            yield row(f"{subject.name}, one update: {name}", f"1 - cosine, {metric}", "", ours, base[metric],
                      YARDSTICK, True)


def probed(subject: Subject) -> dict:
    """The probes' metrics and mismatch by layer, with every linear, keys, values and attention in FP8."""
    precision = variant(subject.model.num_hidden_layers, FP8 | {"kv": KvFormat(fp8=True, attention_fp8=True)})
    report = precision_report(subject.params, subject.batch, subject.model, precision)
    by_layer = {name: report.gaps[name].tolist() for name in ("one_in", "left_without", "leave_one_out")}
    return {"metrics": report.metrics(), "layers": report.spans, **by_layer}


def variant(layers: int, fields: dict) -> Precision:
    modules = frozenset() if fields["compute_dtype"] == "bfloat16" else ALL_LINEARS
    return dataclasses.replace(Precision((LayerRun(0, layers, modules),)), **fields)


ALL_LINEARS = frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])


if __name__ == "__main__":
    main()
