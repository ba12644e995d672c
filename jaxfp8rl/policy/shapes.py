"""The model's shape for a run, and its FP8 linears, from the configuration alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import microbatches_needed
from jaxfp8rl.errors import ConfigError, ModelError
from jaxfp8rl.models.config import ModelConfig, named
from jaxfp8rl.models.hf_names import linear_shapes, param_table
from jaxfp8rl.models.packed import check_packable
from jaxfp8rl.models.packed_config import Packed
from jaxfp8rl.precision.layer_runs import LayerRun, fp8_runs, plain_runs
from jaxfp8rl.precision.recipe import get_recipe
from pallas_kernels.quantize import BLOCK


def model_config(cfg: Config, known: ModelConfig | None = None) -> ModelConfig:
    """The model's shape, or `known` if it was read already, checked against the run's sequence lengths. With
    lora.base its linears are in four bits.

    Raises ConfigError if a prompt and its completion may exceed max_position_embeddings, and for a model that
    lora.base does not suit.
    """
    model = known or ModelConfig.from_hf(Path(cfg.model.path) if cfg.model.path else cfg.model.config)
    longest, prompt = model.max_position_embeddings, cfg.task.max_prompt_tokens
    if cfg.max_model_len > longest:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.max_new_tokens = {cfg.max_model_len} exceeds the model's "
            f"max_position_embeddings = {longest}",
            f"set rollout.max_new_tokens to {longest - prompt} at most" if prompt < longest
            else "lower task.max_prompt_tokens",
        )
    return model if cfg.lora.base == "stored" else _in_four_bits(cfg, model)


def _in_four_bits(cfg: Config, model: ModelConfig) -> ModelConfig:
    base = f'lora.base = "{cfg.lora.base}"'
    if model.packed:
        raise ConfigError(f"{base}: {cfg.model.path or 'model.config'} is in {model.packed.form} already",
                          "leave lora.base out, or name the BF16 folder as model.path")
    model = dataclasses.replace(model, packed=Packed(cfg.lora.base, stored=False))
    try:
        check_packable(model)
    except ModelError as e:
        raise ConfigError(f"{base}: {e.message}", f"{e.next_step}, or leave lora.base out") from e
    return model


def engine_runs(cfg: Config, model: ModelConfig) -> tuple[LayerRun, ...]:
    """The linears that the engine holds in FP8, by layer; none under a recipe without FP8."""
    if not get_recipe(cfg.precision.recipe).engine_fp8:
        return plain_runs(model.sparse_layers)
    return weights_in_fp8(cfg, model)


def weights_in_fp8(cfg: Config, model: ModelConfig) -> tuple[LayerRun, ...]:
    """The linears that would be FP8 under an FP8 recipe, by layer. Raises ConfigError for shapes that FP8
    does not support."""
    p, layers = cfg.precision, model.num_hidden_layers
    return fp8_runs(linear_shapes(model), layers, p.first_layers_bf16, p.last_layers_bf16, p.exclude,
                    model.sparse_layers)


def teacher_config(cfg: Config) -> ModelConfig:
    """The shape of the model in reference.path. Raises ModelError if there is none."""
    with named("reference.path"):
        return ModelConfig.from_hf(Path(cfg.reference.path))


def teacher_runs(cfg: Config, teacher: ModelConfig) -> tuple[LayerRun, ...]:
    """The FP8 linears of the model in reference.path, by layer. Raises ConfigError for shapes that FP8 does
    not support."""
    if cfg.reference.recipe != "fp8":
        return plain_runs(teacher.sparse_layers)
    return fp8_runs(linear_shapes(teacher), teacher.num_hidden_layers, sparse_layers=teacher.sparse_layers)


def check_divides(fsdp: int, tensor: int, model: ModelConfig, quantized: bool) -> None:
    """Raise ConfigError, naming the first weight whose shape the mesh does not divide. One device divides
    nothing.

    `quantized`: linears are divided in whole blocks of 128.
    """
    if fsdp * tensor == 1:
        return
    if model.num_key_value_heads % tensor:
        heads = f"num_key_value_heads = {model.num_key_value_heads}"
        raise ConfigError(f"train.tensor = {tensor} does not divide {heads}: a device holds whole heads",
                          "use fewer")
    if model.experts and model.experts.num_experts % (fsdp * tensor):
        raise ConfigError(f"{_over(fsdp, tensor)} does not divide num_experts = {model.experts.num_experts}",
                          "use fewer")
    for e in param_table(model):
        if len(e.shape) < 2 or len(e.index) == 2:  # vectors, and experts, which lie whole on one device
            continue
        block = BLOCK if quantized and e.role.kind == "linear" else 1
        along_tensor = tensor if e.role.tensor == "rows" else 1
        # columns need no check of their own: they are the rows of another weight
        if e.shape[0] % (fsdp * along_tensor * block):
            blocks = f" in whole blocks of {BLOCK}" if block > 1 else ""
            rows = f"the {e.shape[0]} rows of {e.hf_name}{blocks}"
            raise ConfigError(f"{_over(fsdp, along_tensor)} does not divide {rows}", "use fewer")


def _over(fsdp: int, tensor: int) -> str:
    return f"train.fsdp = {fsdp}" if tensor == 1 else f"train.fsdp * train.tensor = {fsdp * tensor}"


def microbatches_of(cfg: Config) -> int:
    """Micro-batches of an update of `cfg` in the worst case, so that its shape never changes."""
    r, t = cfg.rollout, cfg.train
    samples = r.prompts_per_step // t.updates_per_step * (cfg.selection.keep or r.samples_per_prompt)
    return microbatches_needed(samples, cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
