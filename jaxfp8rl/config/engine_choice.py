"""`rollout.engine = "auto"`: the engine by the settings, the model's shape and what was measured.

A config that has been read names an engine; no other module meets "auto".
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError

# The largest model, and the most sequences at once, with which the embedded engine was seen to sample faster
# than vLLM: Qwen3-1.7B in FP8 on an H100 (benchmarks/results/engine_rollout.json).
MEASURED = {"hidden_size": 2048, "num_hidden_layers": 28}
SEQUENCES = 64


def with_engine(cfg: Config) -> Config:
    """The config with an engine in place of "auto", and a line on stderr that names it and says why.

    A rule that refuses one of the two engines decides for the other. Raises the ConfigError of the engine
    that would have been taken if the rules refuse both.
    """
    if cfg.rollout.engine != "auto":
        return cfg
    engine, why = _preferred(cfg)
    candidates = {name: cfg.having("rollout", engine=name) for name in ("jax", "vllm")}
    refused = {name: error for name, config in candidates.items() if (error := _refusal(config))}
    if engine in refused and len(refused) == 1:
        engine, why = ("jax" if engine == "vllm"
                       else "vllm"), f'"{engine}" is refused: {refused[engine].message}'
    print(f'rollout.engine: "auto" takes "{engine}": {why}', file=sys.stderr)
    return candidates[engine]


def _refusal(cfg: Config) -> ConfigError | None:
    try:
        check(cfg)
    except ConfigError as error:
        return error
    return None


def _preferred(cfg: Config) -> tuple[str, str]:
    """(engine, reason), before any rule is asked."""
    if not importlib.util.find_spec("vllm"):
        return "jax", "vLLM is not installed here"
    if cfg.train.devices > 1:
        return "vllm", (f"{cfg.train.mesh}, and the embedded engine was measured beside a learner on one GPU "
                        "alone")
    p, r, shape = cfg.precision, cfg.rollout, _shape(cfg)
    if "quantization_config" in shape or cfg.lora.base != "stored":
        return "jax", "it shares the learner's packed base, of which vLLM would hold another"
    if not p.resolve().engine_fp8 or p.first_layers_bf16 or p.last_layers_bf16 or p.exclude:
        return "vllm", "the embedded engine's kernels for few rows want all linears of the layers in FP8"
    if shape.get("num_experts") or shape.get("num_local_experts"):
        return "vllm", "the embedded engine was not measured with a mixture of experts"
    if larger := [f"{key} = {shape.get(key)}" for key, most in MEASURED.items()
                  if not isinstance(shape.get(key), int) or shape[key] > most]:
        return "vllm", f"the embedded engine was not measured faster with {' and '.join(larger)}"
    if (at_once := min(r.max_num_seqs, r.prompts_per_step * r.samples_per_prompt)) > SEQUENCES:
        return "vllm", f"the embedded engine was not measured faster with {at_once} sequences at once"
    return "jax", ("of a dense FP8 model no larger than Qwen3-1.7B and at most 64 sequences at once it "
                   "samples faster on an H100 (docs/engine.md)")


def _shape(cfg: Config) -> dict[str, Any]:
    """The table of a model's config.json; empty if there is none to read, which others refuse by name."""
    if not cfg.model.path:
        table = cfg.model.config
    else:
        try:
            table = json.loads((Path(cfg.model.path).expanduser() / "config.json").read_text())
        except (OSError, ValueError):
            table = {}
    inner = table.get("text_config", table) if isinstance(table, dict) else {}
    return inner if isinstance(inner, dict) else {}
