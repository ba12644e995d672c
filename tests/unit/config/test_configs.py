"""The shipped configs fit the GPUs they are named after, and end with the memory plan that `--dry-run` prints
of them.

When the plan changes, `python tests/unit/config/test_configs.py` writes the new ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.common import RESULTS
from benchmarks.common import config as qwen3
from jaxfp8rl.cli.dry_run import CARDS
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory.cache import chosen_gib, format_cache, held_at_once
from jaxfp8rl.memory.fit import check_fits, format_needs
from jaxfp8rl.memory.plan import format_plan, memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.models.known import known_shape, shape_named
from jaxfp8rl.models.packed_config import Packed, form_named
from jaxfp8rl.policy.shapes import check_divides

CONFIGS = Path(__file__).parents[3] / "configs"
# bytes; an H100's by what is left of its 80 GB, an H200's by the driver
MEMORY = {"h100": 79 * 2**30, "h200": 150_754_820_096}
LARGER = {"num_attention_heads": 40, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
MODELS = {  # as their config.json has them
    "Qwen3-0.6B": qwen3("0.6b"),
    "Qwen3-1.7B": qwen3("1.7b"),
    "Qwen3-4B": qwen3("4b"),
    "Qwen3-8B": qwen3("8b"),
    "Qwen3-14B": qwen3("8b") | LARGER,
    "Qwen3-32B": qwen3("8b") | LARGER | {"num_attention_heads": 64, "intermediate_size": 25600,
                                         "num_hidden_layers": 64},
    "Llama-3.1-8B-Instruct": qwen3("8b") | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_hidden_layers": 32, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
    },
}
PARAMETERS = {"Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.8,
              # billions, as their makers count them; fmt: skip
              "Qwen3-32B": 32.8, "Llama-3.1-8B-Instruct": 8.03}
NAMED = {p.stem: p for p in sorted(CONFIGS.glob("*.toml")) if re.search(r"-h[12]00", p.stem)}


def parts(name: str) -> tuple[str, int]:
    """("h200", 4) of "qwen3-32b-h200x4"; what follows says what the preset is for."""
    gpu, count = re.fullmatch(r".*-(h[12]00)(?:x(\d))?(?:-[a-z0-9]+)?", name).groups()
    return gpu, int(count or 1)


def loaded(name: str) -> tuple[Config, ModelConfig]:
    cfg = load_config(name)
    folder, model = Path(cfg.model.path).parts
    assert folder == "models"
    plain, form = form_named(model)
    found = ModelConfig.from_hf(MODELS[plain])
    return cfg, dataclasses.replace(found, packed=Packed(form)) if form else found


def comment(name: str) -> str:
    """What a config ends with; a cache that is "auto" has the size of its own card."""
    cfg, model = loaded(name)
    plan = format_plan(memory_plan(cfg, model)) + format_needs(cfg, model)
    if cfg.rollout.kv_cache_gib == "auto":
        card = {"h100": "a GPU of 80 GB", "h200": "a GPU of 141 GB"}[parts(name)[0]]
        plan += "\n" + format_cache(cfg, model, {card: CARDS[card]})
    return "\n".join(f"# {line}".rstrip() for line in [f"jaxfp8rl train {name} --dry-run",
                                                       *plan.splitlines()]) + "\n"


def of_update(cfg: Config, model: ModelConfig) -> int:
    """The bytes of an update in the plan: all but what the embedded engine holds beside the base that it
    shares."""
    return sum(size for what, size in memory_plan(cfg, model) if not what.startswith("engine:"))


@pytest.mark.parametrize("name", NAMED)
def test_a_config_fits_its_gpus(name):
    cfg, model = loaded(name)
    gpu, count = parts(name)
    assert cfg.train.devices == count and Path(cfg.run.dir).name == name
    check_divides(cfg.train.fsdp, cfg.train.tensor, model, quantized=True)
    check_fits(cfg, model, MEMORY[gpu])


@pytest.mark.parametrize("name", [n for n, p in NAMED.items() if 'kv_cache_gib = "auto"' in p.read_text()])
def test_an_automatic_cache_holds_what_a_config_decodes_at_once_and_no_more(name):
    (cfg, model), total = loaded(name), MEMORY[parts(name)[0]]
    held = lambda c: held_at_once(c, model, int(chosen_gib(c, model, total) * 2**30))
    assert held(cfg) == cfg.rollout.max_num_seqs == held(cfg.having("rollout", max_num_seqs=64))


@pytest.mark.parametrize("name", NAMED)
def test_the_plan_of_a_config_is_within_3_percent_of_what_xla_needed(name):
    """Compiled for the GPUs that it names: `python tests/sm90a/preset_memory.py NAME` compiles it anew."""
    needed = json.loads((RESULTS / "preset_memory.json").read_text())["presets"][name]["device"]
    assert of_update(*loaded(name)) == pytest.approx(needed, rel=0.03)


@pytest.mark.parametrize("name", NAMED)
def test_a_config_ends_with_its_plan(name):
    _, found = re.split(r"^(?=# jaxfp8rl train )", NAMED[name].read_text(), maxsplit=1, flags=re.MULTILINE)
    assert found == comment(name), "python tests/unit/config/test_configs.py writes the new plans"


@pytest.mark.parametrize("name", NAMED)
def test_random_model_makes_the_model_of_each_preset(name):
    cfg, model = loaded(name)
    plain, form = form_named(Path(cfg.model.path).name)
    assert shape_named(plain) == dataclasses.replace(model, packed=None)
    assert not form or known_shape(cfg.model.path) == model  # which `quantize` makes of it
    assert cfg.task.kind == "reasoning_gym" and cfg.task.chat  # which needs no file and no network


def test_the_page_of_presets_lists_each_config_with_its_model_and_gpus():
    """What was seen of each, or that nothing was, stands there alone."""
    listed = re.findall(r"^\| `([\w.-]+)` \| ([\w.-]+) \| (\w+ H\d+)s? \| .+ \|$",
                        (CONFIGS.parent / "docs" / "presets.md").read_text(), re.MULTILINE)
    counts = {1: "one", 2: "two", 4: "four", 8: "eight"}
    expected = set()
    for name in NAMED:
        gpu, count = parts(name)
        expected.add((name, Path(loaded(name)[0].model.path).name, f"{counts[count]} {gpu.upper()}"))
    assert set(listed) == expected and len(listed) == len(expected)
    assert not [p.name for p in CONFIGS.glob("*.toml") if "not run" in p.read_text()]


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_their_size(name):
    billions = sum(math.prod(e.shape) for e in param_table(ModelConfig.from_hf(MODELS[name]))) / 1e9
    assert billions == pytest.approx(PARAMETERS[name], rel=5e-3)


def write_plans() -> None:
    for name, path in NAMED.items():
        head = re.split(r"^# jaxfp8rl train ", path.read_text(), maxsplit=1,
                        flags=re.MULTILINE)[0].rstrip("\n")
        path.write_text(f"{head}\n\n{comment(name)}")


if __name__ == "__main__":
    write_plans()
