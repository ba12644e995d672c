"""`jaxfp8rl bench presets`: what it reads off a run, of a child that acts as one and, slowly, of a true
run."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import presets
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.config.toml import presets as shipped

CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]); (folder / "logs").mkdir(parents=True)
(folder / "logs" / "stderr.txt").write_text("I bfc_allocator.cc: Garbage collection\\n")
print("W bfc_allocator.cc: ran out of memory trying to allocate 1GiB", file=sys.stderr, flush=True)
print("start: 1.0 s", flush=True)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(int(sys.argv[2]) + 1):
        seconds = dict(step=10.0 if step > 1 else 60.0, rollout=4.0, score=1.0, update=4.5, publish=0.25)
        times = {f"time/{k}_s": v for k, v in seconds.items()}
        record = {"step": step} | (times | {"tokens/rollout": 1000, "tokens/rollout_per_s": 250.0,
                                            "update/applied": 1.0,
                                            "memory/peak_gib": 70.0 + step} if step else {})
        print(json.dumps(record), file=file, flush=True)
        time.sleep(0.7 if step == 1 else 0.0)
sys.exit(int(sys.argv[3]))
"""


def acted(tmp_path, steps: int, code: int = 0, timeout: float = 60.0) -> presets.Seen:
    used = iter([100, 70 * 1024, *[200] * 1000])
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run"), str(steps), str(code)]
    return presets.run(command, tmp_path / "run", timeout, lambda: next(used), tmp_path / "log")


def table(name: str, seen: presets.Seen) -> dict[tuple[str, str], dict]:
    rows = presets.rows_of(name, load_config(name), seen, 3, 80 * 1024)
    assert {r["case"] for r in rows} == {f"{name}: Qwen3-8B, 64 x 4,096 tokens"}
    return {(r["metric"], r["unit"]): r for r in rows}


def test_a_run_becomes_rows(tmp_path):
    seen = acted(tmp_path, 3)
    assert seen.code == 0 and len(seen.times) == 4 and seen.times[3] - seen.times[1] >= 0.4
    rows = table("qwen3-8b-h100", seen)
    ours = {key: r["ours"] for key, r in rows.items()}
    assert (ours["steps", ""], ours["exit code", ""], ours["lines of an allocator", ""]) == (3, 0, 1)
    assert ours["updates applied", ""] == 3
    assert ours["step", "s"] == 10 and ours["step", "tokens/s"] == 100 and ours["first step", "s"] == 60
    first = rows["first update", "s"]
    assert first["ours"] == pytest.approx(seen.times[1] - 0.25 - 4.0) and first["yardstick"] == 150
    assert ours["peak of the learner", "GiB"] == 73 and ours["peak of the device", "GiB"] == 70
    assert rows["peak of the device, of the card", "GiB"]["ratio"] == pytest.approx(80 / 70)
    plan = presets.memory_plan(load_config("qwen3-8b-h100"), presets.shape_named("Qwen3-8B"))
    planned = sum(size for _, size in plan) / 2**30
    assert rows["peak of the learner", "GiB"]["yardstick"] == pytest.approx(planned)


def test_a_run_that_fails_keeps_what_it_came_to(tmp_path):
    rows = table("qwen3-8b-h100", acted(tmp_path, 1, code=6))
    assert rows["steps", ""]["ours"] == 1 and rows["exit code", ""]["ours"] == 6
    assert ("step", "s") not in rows and rows["peak of the learner", "GiB"]["ours"] == 71
    none = presets.run([sys.executable, "-c", "raise SystemExit(2)"], tmp_path / "none", 60, lambda: None,
                       tmp_path / "log")
    assert table("qwen3-8b-h200", none)["steps", ""]["ours"] == 0


def test_a_run_that_hangs_is_ended_with_its_children_and_leaves_its_console(tmp_path):
    child = "import subprocess, time; print('began', flush=True); subprocess.run(['sleep', '60'])"
    seen = presets.run([sys.executable, "-c", child], tmp_path, 2.0, lambda: None, tmp_path / "log")
    assert seen.code == -9  # and nobody holds the console any more
    seconds, word = (tmp_path / "log").read_text().split()
    assert 0 <= float(seconds) < 2 and word == "began"


def test_a_result_keeps_the_cases_of_other_presets(tmp_path):
    out = tmp_path / "presets_h100.json"
    assert presets.earlier(out, {}) == []
    out.write_text(json.dumps({"rows": [{"case": "a-h100: A, 64"}, {"case": "b-h100: B, 64"}]}))
    assert presets.earlier(out, {"a-h100": None}) == [{"case": "b-h100: B, 64"}]
    acted(tmp_path, 1)
    presets.keep(tmp_path / "log", tmp_path / "run")
    text = (tmp_path / "log").read_text()
    assert "start: 1.0 s" in text and "Garbage collection" in text


def test_the_presets_by_default_are_shipped_and_have_a_shape():
    for name in presets.DEFAULT:
        assert name in shipped()
        cfg = load_config(name, presets.CHANGED)
        assert presets.shape_named(cfg.model.path) and cfg.task.options["held_out_size"] == 0


TINY = """\
[run]
dir = "run"
steps = 500
[model]
path = "models/Tiny"
[task]
kind = "reasoning_gym"
name = "countdown"
chat = true
max_prompt_tokens = 300
[rollout]
engine = "jax"
prompts_per_step = 2
samples_per_prompt = 4
max_new_tokens = 32
[train]
row_tokens = 332
[optim]
lr = 1e-6
[loss]
entropy_coef = 1e-3  # a gradient in each update, also where all rewards of a step are equal
"""


@pytest.mark.slow  # the same functions as above, of a true run
def test_a_true_run_on_random_weights(tmp_path, monkeypatch):
    from jaxfp8rl.models import known

    monkeypatch.setitem(known.KNOWN, "Tiny", {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048, "hidden_size": 128, "head_dim": 32,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": True})
    monkeypatch.setitem(known._BY_NAME, "tiny", "Tiny")
    (tmp_path / "tiny.toml").write_text(TINY)
    cfg = load_config(str(tmp_path / "tiny.toml"), presets.CHANGED)
    made = presets.model_folder(cfg, tmp_path)
    assert presets.model_folder(cfg, tmp_path) == made
    command = presets.train(str(tmp_path / "tiny.toml"), tmp_path / "run",
                            [*presets.CHANGED, *presets.ends_early(cfg), "--run.steps", "3",
                             "--model.path", str(made)])
    seen = presets.run(command, tmp_path / "run", 600, lambda: None, tmp_path / "log")
    assert seen.code == 0, seen.console
    rows = {(r["metric"], r["unit"]): r["ours"] for r in presets.rows_of("tiny", cfg, seen, 3, 80 * 1024)}
    assert rows["steps", ""] == 3 and rows["updates applied", ""] == 3
    assert rows["lines of an allocator", ""] == 0
    assert 0 < rows["step", "s"] < rows["first step", "s"]
    assert rows["first update", "s"] > rows["first step", "s"] / 4
