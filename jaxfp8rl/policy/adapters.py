"""The adapters of a run as masters, and the base that lies under them (jaxfp8rl.precision.adapters).

Masters are `{"layers": {"lora": {"self_attn": {"q_proj": {"lora_A" [L, r, K], "lora_B" [L, N, r]}}}}}`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.peft import adapter_base, check_adapter, read_adapter, write_adapter
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import LORA, A, B
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.records import AdapterProduct
from jaxfp8rl.types import Params


def adapter_product(cfg: Config) -> AdapterProduct | None:
    """How the adapters of a config compute; None if it has none."""
    return AdapterProduct(cfg.lora.scale, cfg.lora.dtype) if cfg.lora.rank else None


def adapter_shapes(cfg: Config, model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The linears that have an adapter, "self_attn.q_proj" -> (N, K). Raises ConfigError for targets that
    the model's layers do not all have: an expert's."""
    shapes = linear_shapes(model)
    if model.experts and (of_experts := [t for t in cfg.lora.targets if f"mlp.experts.{t}" in shapes]):
        raise ConfigError(f"lora.targets: the {', '.join(of_experts)} of {model.architecture} belong to "
                          "experts, which take no adapters", 'set lora.targets to those of attention: '
                          '["q_proj", "k_proj", "v_proj", "o_proj"]')
    return {name: shape for name, shape in shapes.items() if name.split(".")[-1] in cfg.lora.targets}


def check_base(cfg: Config, model: ModelConfig) -> None:
    """Raise ConfigError for a model in four bits whose run would train or hold its weights otherwise."""
    if model.packed is None:
        return
    found = f"{cfg.model.path or 'model.config'} has weights in four bits ({model.packed.form})"
    if cfg.lora.base != "stored":
        found = f'lora.base = "{cfg.lora.base}" puts the base in four bits'
    if not cfg.lora.rank:
        raise ConfigError(f"model.path: {found}, which do not learn, and lora.rank = 0 trains all parameters",
                          "set lora.rank = 32 to train adapters over them (docs/lora.md), or "
                          "name a BF16 folder")
    if cfg.precision.recipe != "bf16":
        raise ConfigError(f'precision.recipe = "{cfg.precision.recipe}": {found}, which FP8 does not take',
                          'set precision.recipe = "bf16": the products are in BF16, of the decoded weights')
    if cfg.lora.publish == "merged":
        raise ConfigError(f'lora.publish = "merged": {found}, of which a sum with adapters is none',
                          'set lora.publish = "adapters"')
    if cfg.rollout.engine == "vllm":
        _check_vllm(cfg, found)


def _check_vllm(cfg: Config, found: str) -> None:
    """Raise ConfigError for settings with which vLLM cannot have the weights in four bits that `found`
    names: it reads them once, from their folder."""
    once = f"{found}, which vLLM reads from their folder once"
    if not cfg.model.path:
        raise ConfigError(f"model.path is empty: {once}",
                          'name a folder of `jaxfp8rl quantize`, or set rollout.engine = "jax"')
    if cfg.rollout.publish == "reload":
        raise ConfigError(f'rollout.publish = "reload": {once}', "leave rollout.publish out")
    if cfg.rollout.sleep == "drop_weights":
        raise ConfigError(f'rollout.sleep = "drop_weights": {once}', 'set rollout.sleep = "keep_weights"')
    if cfg.precision.weight_dtype != "bfloat16":
        raise ConfigError(f'precision.weight_dtype = "{cfg.precision.weight_dtype}": {found}, '
                          "by whose decoded numbers vLLM multiplies in bfloat16",
                          'set precision.weight_dtype = "bfloat16"')


def init_adapters(cfg: Config, model: ModelConfig) -> Params:
    """Fresh adapters in float32, as PEFT draws them: A uniform in +-1/sqrt(K), which is `kaiming_uniform_`
    with a = sqrt(5), and B zero. They depend on the run's seed."""
    r, layers = cfg.lora.rank, model.num_hidden_layers
    adapters: Params = {}
    for i, (name, (n, k)) in enumerate(adapter_shapes(cfg, model).items()):
        part, module = name.split(".")
        key = jax.random.fold_in(jax.random.key(cfg.run.seed), i)
        drawn = jax.random.uniform(key, (layers, r, k), jnp.float32, -1, 1) / k**0.5
        adapters.setdefault(part, {})[module] = {A: drawn, B: jnp.zeros((layers, n, r), jnp.float32)}
    return {"layers": {LORA: adapters}}


def starting_masters(cfg: Config, model: ModelConfig, base: Callable[[], Params]) -> Params:
    """The parameters with which a run begins to learn: its adapters, fresh ones or those of lora.path, or
    else all, which `base` gives. Raises ModelError as `read_adapter` does."""
    if not cfg.lora.rank:
        return base()
    return read_adapters(cfg, model)[0] if cfg.lora.path else init_adapters(cfg, model)


def masters_like(cfg: Config, model: ModelConfig) -> Params:
    """The shapes of a run's masters in float32."""
    if cfg.lora.rank:
        return jax.eval_shape(lambda: init_adapters(cfg, model))
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def _peft_shapes(cfg: Config, model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The tensors of an adapter folder, without PEFT's prefix."""
    r = cfg.lora.rank
    return {f"model.layers.{i}.{name}.{which}.weight": shape for i in range(model.num_hidden_layers)
            for name, (n, k) in adapter_shapes(cfg, model).items()
            for which, shape in ((A, (r, k)), (B, (n, r)))}


def check_adapters(cfg: Config, model: ModelConfig) -> None:
    """Raise ModelError if the adapter folder lora.path, whose headers are read, does not suit the run."""
    check_adapter(cfg.lora.path, _peft_shapes(cfg, model), **_settings(cfg))


def _settings(cfg: Config) -> dict[str, Any]:
    return {"rank": cfg.lora.rank, "alpha": cfg.lora.alpha, "rslora": cfg.lora.rslora}


def read_adapters(cfg: Config, model: ModelConfig) -> tuple[Params, str]:
    """(the masters of the adapter folder lora.path, the digest of its base or ""). Raises ModelError."""
    tensors, digest = read_adapter(cfg.lora.path, _peft_shapes(cfg, model), **_settings(cfg))
    adapters: Params = {}
    for name in adapter_shapes(cfg, model):
        part, module = name.split(".")
        stacked = lambda which, name=name: jnp.asarray(np.stack(
            [tensors[f"model.layers.{i}.{name}.{which}.weight"] for i in range(model.num_hidden_layers)]))
        adapters.setdefault(part, {})[module] = {A: stacked(A), B: stacked(B)}
    return {"layers": {LORA: adapters}}, digest


def write_adapters(folder: str | Path, cfg: Config, model: ModelConfig, adapters: Params,
                   digest: str) -> None:
    """Write masters, float32, as an adapter folder of PEFT. digest: of the base. Raises ModelError."""
    tensors = {}
    for name in _peft_shapes(cfg, model):
        _, _, layer, part, module, which, _ = name.split(".")
        tensors[name] = np.asarray(adapters["layers"][LORA][part][module][which][int(layer)], np.float32)
    write_adapter(folder, tensors, rank=cfg.lora.rank, alpha=cfg.lora.alpha, rslora=cfg.lora.rslora,
                  targets=cfg.lora.targets, base=cfg.model.path, digest=digest)


def check_digest(found: str, recorded: str, where: str) -> None:
    """Raise CheckpointError if the base's weights are others than those that adapters were trained over.
    `recorded`: their digest in what `where` names, "" if it has none."""
    if recorded and found != recorded:
        raise CheckpointError(
            f"model.path: its weights are not those over which the adapters of {where} were trained: "
            f"SHA-256 {found[:16]}..., expected {recorded[:16]}...", "name the folder of the same base")


class OverBase:
    """policy(adapters) -> the policy of these adapters over the run's base.

    The base is read when it is first asked for, and kept. `rounded`: the jitted policy_of adapters.
    `base_policy`: the jitted policy_of base weights.
    """

    def __init__(self, rounded: Callable[[Params], Params], base_policy: Callable[[Params], Params],
                 read: Callable[[], Params], cfg: Config):
        self._rounded, self._base_policy, self._read = rounded, base_policy, read
        self._config, self._digest = cfg, ""

    @property
    def digest(self) -> str:
        """Of the base's weights (`digest_of`)."""
        assert self.base
        return self._digest

    @functools.cached_property
    def base(self) -> Params:
        """The policy of the base's weights. Raises CheckpointError if lora.path is of another base."""
        cfg, params = self._config, self._read()
        self._digest = digest_of(params)
        # a run that goes on has a digest in its checkpoint, and the folder where it began may be gone
        if cfg.lora.path and Path(cfg.lora.path).exists():
            check_digest(self._digest, adapter_base(cfg.lora.path)[1], f"lora.path = {cfg.lora.path}")
        return base_of(params, self._base_policy)

    def __call__(self, adapters: Params) -> Params:
        return over_base(self._rounded(adapters), self.base)


def base_of(params: Params, base_policy: Callable[[Params], Params]) -> Params:
    """The policy of `params`, which may be numpy arrays. Those are moved to the device and rounded a stack at
    a time, so that the device does not hold all of them in high precision."""
    if isinstance(params["embed_tokens"]["weight"], jax.Array):
        return base_policy(params)
    outside = {name: node for name, node in params.items() if name != "layers"}
    whole = base_policy({**jax.tree.map(jnp.asarray, outside), "layers": {}})
    for name, node in params["layers"].items():
        modules = {"weight": node} if "weight" in node else node
        for module, weights in modules.items():
            part = {name: {module: weights} if modules is node else weights}
            made = base_policy({"layers": jax.tree.map(jnp.asarray, part)})
            whole["layers"] = tuple(map(_joined, whole["layers"], made["layers"]))
    return whole


def _joined(stack: Params, part: Params) -> Params:
    """The stack with the modules of `part`, one of its parts."""
    return {**stack, **{name: {**stack.get(name, {}), **node} for name, node in part.items()}}


def base_weights(cfg: Config, model: ModelConfig) -> Params:
    """The weights of the base: of the folder, in the type that they are stored in, or random ones from the
    run's seed."""
    return starting_params(cfg, model, dtype="stored")


def merged(cfg: Config, model: ModelConfig, base: Params, adapters: Params) -> Params:
    """`base` [numpy or jax arrays, one stack of layers] with W + s B A in place of W, in float32, where there
    is an adapter. A and B are first rounded to lora.dtype, as in the policy."""
    layers = dict(base["layers"])
    for name in adapter_shapes(cfg, model):
        part, module = name.split(".")
        pair, node = adapters["layers"][LORA][part][module], layers[part][module]
        weight = _merged(node["weight"], pair[A], pair[B], cfg.lora.scale, cfg.lora.dtype)
        layers[part] = {**layers[part], module: {**node, "weight": weight}}
    return {**base, "layers": layers}


@functools.partial(jax.jit, static_argnums=(3, 4))
def _merged(weight: Array, a: Array, b: Array, scale: float, dtype: str) -> Array:
    a, b = (round_to(x, dtype) for x in (a, b))
    b = round_to(scale * b, dtype)  # as a product of adapters rounds it
    delta = jnp.einsum("lnr,lrk->lnk", b, a, precision=jax.lax.Precision.HIGHEST)
    return weight.astype(jnp.float32) + delta


def digest_of(params: Params) -> str:
    """The SHA-256 of the base's weights, by name, shape, type and bytes."""
    def one(leaf: tuple) -> bytes:
        path, x = leaf
        x = np.ascontiguousarray(x)
        said = f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}".encode()
        return hashlib.sha256(said + hashlib.sha256(x.view(np.uint8)).digest()).digest()

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter
        return hashlib.sha256(b"".join(pool.map(one, leaves))).hexdigest()
