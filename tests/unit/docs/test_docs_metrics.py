"""Every number that a run can write to metrics.jsonl stands in a table of the docs, and each in a table can
be written."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.data.curriculum import Curriculum
from jaxfp8rl.losses.correction import AdaptiveMix, CorrectionConfig, Rejection, rollout_correction
from jaxfp8rl.losses.presets import PRESETS
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.monitors.names import METRICS, is_metric
from jaxfp8rl.policy import routing_replay
from jaxfp8rl.precision.kv_scales import NAMES
from jaxfp8rl.training.calibrate import KvCalibration

ROOT = Path(__file__).parents[3]
# tok/s heads a column of the console; the type of a body is application/json
OTHERS = {name.split("/")[0] for name in PRESETS} | {"tok", "application"}
METRIC = re.compile(r"[a-z]+(/[a-z0-9_*]*[a-z0-9*])+")
MICRO = [
    "--run.steps", "1", "--run.save_every", "0", "--run.eval_problems", "4", "--gate.completions", "4",
    "--sft.steps", "0",
    "--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2", "--rollout.kv_cache", "auto",
    "--loss.kl_coef", "0.1",
    "--precision.recipe", "bf16", "--model.config.num_hidden_layers", "1", "--train.row_tokens", "40",
    "--train.rows_per_microbatch", "2", "--task.options.operands", "2",
]


def in_code() -> set[str]:
    """String literals that look like metrics, and phases of clocks; "*" for what an f-string fills in."""
    found = set()
    for path in [*(ROOT / "jaxfp8rl").rglob("*.py"), *(ROOT / "bridges/engines").glob("*.py"),
                 ROOT / "bridges/admission.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    found.add(text)
                case ast.JoinedStr(values=values):
                    found.add("".join(v.value if isinstance(v, ast.Constant) else "*" for v in values))
                case ast.Call(func=ast.Name(id="clock"), args=[ast.Constant(value=phase)]):
                    found.add(f"time/{phase}_s")
    return {name for name in found if METRIC.fullmatch(name) and name.split("/")[0] not in OTHERS}


def of_corrections() -> set[str]:
    """Of one that does all there is."""
    everything = CorrectionConfig(
        batch_normalize=True, m2_limit=0.04, adaptive=AdaptiveMix(),
        rejections=(Rejection("sequence", "k3", upper=1.0),)
    )
    row = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    mask, ids = jax.ShapeDtypeStruct(row.shape, bool), jax.ShapeDtypeStruct(row.shape, jnp.int32)
    of = lambda old, new, mask, ids: rollout_correction(old, new, mask, everything, ids).metrics
    return {*jax.eval_shape(of, row, row, mask, ids)}


def of_routes() -> set[str]:
    routes, ids = jax.ShapeDtypeStruct((1, 1, 8, 2, 2), jnp.uint8), jax.ShapeDtypeStruct((1, 1, 8), jnp.int32)
    return {*jax.eval_shape(routing_replay.disagreement, routes, routes, ids)}


@pytest.fixture(scope="module")
def written(tmp_path_factory, quick_compile) -> set[str]:
    """By a run of one step, that of tasks.md with its rewards, by what that run had not, and what else the
    code names."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import jaxfp8rl\n.*?)```", page, re.S)
    short = program.replace('"--run.steps", "2"', repr(["--run.dir", str(folder), *MICRO])[1:-1])
    assert short != program
    exec(compile(short, "tasks.md", "exec"), scope := {"__name__": "tasks.md"})
    assert scope["seen"], "the function kept its state"
    assert {"reward/brief/mean", "reward/correct/mean"} <= read_metrics(folder / "metrics.jsonl")[-1].keys()
    probes = json.loads((ROOT / "benchmarks" / "results"
                         / "precision_errors.json").read_text(encoding="utf-8"))["probes"]
    scales = KvCalibration.metrics(SimpleNamespace(amax=dict.fromkeys(NAMES, np.ones(2))))
    found = set().union(*read_metrics(folder / "metrics.jsonl"), *(p["metrics"] for p in probes.values()),
                        scales)
    solved = Curriculum(["guess"])
    solved.learn([(0, np.ones(1))])
    found |= of_corrections() | of_routes() | solved.metrics().keys()
    for name in in_code():
        if "*" not in name:
            found.add(name)
        else:
            filled = re.escape(name).replace(r"\*", ".+")
            assert any(re.fullmatch(filled, one)
                       for one in found), f"{name}: what it is filled with is not tried here"
    return found


TABLE = re.compile(r"^\| ((?:key|metric)\b[^|]*)\|.*\n\|[-|]+\n((?:\|.*\n)+)", re.M)


@functools.cache
def documented() -> dict[str, re.Pattern]:
    """Name -> what it stands for, of the first cells of tables of metrics: a/b, c is a/b and a/c; a/b_worst,
    _mean is a/b_mean as well; a/b_{x,y} is two; *, ... and words in capitals stand for anything. A prefix in
    the header is of all."""
    found = {}
    for page in (ROOT / "docs").glob("*.md"):
        for head, rows in TABLE.findall(page.read_text(encoding="utf-8")):
            common = "".join(re.findall(r"`(\w+/)", head))
            for cell in re.findall(r"^\| (.*?) (?<!\\)\| ", rows, re.M):
                before = common
                for name in re.findall(r"`([^`]+)`", cell):
                    if name.startswith("_"):
                        name = before.rpartition("_")[0] + name
                    elif "/" not in name:
                        name = before.rpartition("/")[0] + "/" * ("/" in before) + name
                    before = name
                    filled = re.sub(r"\\\*|\\\.\\\.\\\.|[A-Z]+", ".+", re.escape(name))
                    filled = re.sub(r"\\{(.*)\\}", lambda m: f"({m[1].replace(',', '|')})", filled)
                    found[name] = re.compile(filled)
    return found


def test_every_metric_is_described(written):
    assert [name for name in sorted(written)
            if not any(one.fullmatch(name) for one in documented().values())] == []


def test_every_metric_that_is_described_can_be_written(written):
    assert [name for name, one in documented().items() if not any(map(one.fullmatch, written))] == []


def test_the_names_by_which_a_metric_is_checked_are_those_that_are_written(written):
    assert [name for name in sorted(written) if "*" not in name and not is_metric(name)] == []
    assert [name for name in METRICS
            if not any(one.fullmatch(name.replace("*", "x")) for one in documented().values())] == []
