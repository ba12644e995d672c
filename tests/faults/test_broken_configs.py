"""Row 36: broken configs, each refused on one screen with place, key and remedy; and whatever bytes a file
holds.

`tests/unit/config/test_config.py` compares what is said word by word; this is the breadth: nothing of it is
accepted in silence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import config as qwen3
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config, presets
from jaxfp8rl.errors import ConfigError

DEMO = presets()["demo"].read_text(encoding="utf-8")

# (what stands in the demo's file, what is put there, the key or word that the refusal must name)
IN_FILE = [
    ("[run]", "[runs]", "runs"), ("[run]", "[run", "not valid TOML"), ("[run]", "[[run]]", "run"),
    ("[task]", "[Task]", "Task"),
    ("steps = 100", "step = 50", "run.step"),
    ("steps = 100", "steps = -1", "run.steps"), ("steps = 100", "steps = 1e3", "run.steps"),
    ("steps = 100", 'steps = "50"', "run.steps"), ("steps = 100", "steps = [50]", "run.steps"),
    ("steps = 100", "", "run.steps"),
    ("steps = 100", "steps = true", "run.steps"), ("steps = 100", "steps = 100\nsteps = 51", "overwrite"),
    ("steps = 100", "steps = 100\nsave_every = -1", "save_every"),
    ("save_every = 50", "save_evry = 25", 'did you mean "save_every"'),
    ("save_every = 50", "keep_checkpoints = 0", "run.keep_checkpoints"),
    ("save_every = 50", "seed = 1.5", "run.seed"),
    ("save_every = 50", "watchdog_s = -1", "run.watchdog_s"),
    ("save_every = 50", "save_patience_s = inf", "run.save_patience_s"),
    ("save_every = 50", 'trackers = ["wandbb"]', "run.trackers"), ('dir = "runs/demo"', "dir = 1", "run.dir"),
    ('kind = "arithmetic"', 'kind = "arithmatic"', 'did you mean "arithmetic"'),
    ('kind = "arithmetic"', "", "task.kind"),
    ('kind = "arithmetic"', 'kind = "file"', "task.path"),
    ('kind = "arithmetic"', 'kind = "reasoning_gym"', "task.name"),
    ("max_prompt_tokens = 6", "max_prompt_tokens = 0", "task.max_prompt_tokens"),
    ("max_prompt_tokens = 6", "max_prompt_tokens = 600", "train.row_tokens"),
    ("max_prompt_tokens = 6", "max_prompt_tokens = 6\nreward_timeout_s = 0", "task.reward_timeout_s"),
    ('engine = "jax"', 'engine = "vlm"', 'did you mean "vllm"'),
    ('engine = "jax"', "engine = 0", "rollout.engine"),
    ('engine = "jax"', 'engine = "jax"\nserver_url = "http://x:1"', "rollout.server_url"),
    ('engine = "jax"', 'engine = "jax"\nrestarts = 5', "rollout.restarts"),
    ('engine = "jax"', 'engine = "served"\nengine_urls = ["http://127.0.0.1:1"]',
     "rollout.engine_token_file"),
    ('engine = "jax"', 'engine = "served"\nlink = "nccl"', "rollout.link"),
    ('engine = "jax"', 'engine = "remote"', 'rollout.engine = "served"'),
    ('engine = "jax"', 'engine = "served"\nserver_token_file = "t"', "is rollout.engine_token_file now"),
    ('engine = "jax"', 'engine = "jax"\nsleep = "keep_weights"', "rollout.sleep"),
    ('engine = "jax"', 'engine = "jax"\none_copy = true', "rollout.one_copy"),
    ('engine = "jax"', 'engine = "jax"\ntemperature = 0.0', "rollout.temperature"),
    ('engine = "jax"', 'engine = "jax"\ntop_p = 1.1', "rollout.top_p"),
    ('engine = "jax"', 'engine = "jax"\ntop_k = -1', "top_k"),
    ("prompts_per_step = 64", "prompts_per_step = 64.0", "rollout.prompts_per_step"),
    ("samples_per_prompt = 8", "samples_per_prompt = 1", "rollout.samples_per_prompt"),
    ('recipe = "fp8_unified"', 'recipe = "fp8"', "precision.recipe"),
    ('recipe = "fp8_unified"', 'recipe = "fp16"', "float16"),
    ('recipe = "fp8_unified"', 'recipe = "bf16"\ngradients = "e5m2"', "precision.gradients"),
    ('compute_dtype = "float32"', 'compute_dtype = "fp32"', "precision.compute_dtype"),
    ('preset = "token_tis"', 'preset = "none"', "correction.preset"),
    ('preset = "token_tis"', 'preset = "tis"', "tis"),
    ('preset = "token_tis"', 'preset = "token_tis"\nupper = -1.0', "correction"),
    ("row_tokens = 60", "row_tokens = 8", "train.row_tokens"),
    ("row_tokens = 60", "row_tokens = 60\nfsdp = 3", "train.fsdp"),
    ("row_tokens = 60", "row_tokens = 60\nupdates_per_step = 7", "train.updates_per_step"),
    ("lr = 2e-4", "lr = nan", "optim.lr"), ("lr = 2e-4", "lr = 2e-4\nb1 = 1", "optim.b1"),
    ("lr = 2e-4", "learning_rate = 1", "lr"),
    ("lr = 2e-4", 'lr = 2e-4\nmaster = "float8"', "optim.master"),
    ("[sft]", "[loss]\nhorizon = 3\n[sft]", "loss.aggregation"),
    ("[sft]", "[loss]\npass_at_k = 2\n[sft]", "loss.advantage"),
    ("[sft]", "[loss]\nkl = \"k4\"\n[sft]", "loss.kl"),
    ("[sft]", "[loss]\noverlong_buffer = 99\n[sft]", "loss.overlong_buffer"),
    ("[sft]", "[gate]\nmax_gap = 0\n[sft]", "gate.max_gap"),
    ("[sft]", "[monitor]\nprofile_steps = 3\n[sft]", "profile_step"),
    ("[model]", '[model]\npath = "x"', "model"),
    ('tokenizer = "chars:0123456789+-*="', "", "model.tokenizer"),
]


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "broken.toml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def test_there_are_fifty_and_each_is_another():
    assert len(set(IN_FILE)) == len(IN_FILE) >= 50


@pytest.mark.parametrize("old, new, named", IN_FILE, ids=lambda text: text.replace("\n", " "))
def test_row_36_a_broken_config_is_refused_on_one_screen_with_place_and_remedy(write, old, new, named):
    assert old in DEMO
    path = write(DEMO.replace(old, new, 1))
    with pytest.raises(ConfigError) as e:
        load_config(path)
    said = str(e.value)
    assert path in said and named in said, said
    assert len(said.splitlines()) <= 20 and max(map(len, said.splitlines())) < 400
    assert "Traceback" not in said and "pydantic" not in said


def test_row_36_the_command_line_says_the_same_and_leaves_with_2(write):
    words = [sys.executable, "-m", "jaxfp8rl", "train", write(DEMO.replace("steps = 100", "stesp = 50", 1))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and 'run.stesp: unknown key (did you mean "steps"?)' in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 12


@pytest.mark.parametrize("words, says", [
    (["train", "demo", "--run.dir", "FILE/a"],
     "jaxfp8rl: --run.dir: FILE is a file\n  next step: choose another --run.dir"),
    (["train", "demo", "--dryrun"], '--dryrun: did you mean "--dry-run"?'),
    (["train", "demo", "--optim.learning_rate", "1"], '"learning_rate" of other frameworks is optim.lr here'),
    (["train", "demo", "--correction.preset", "tis"], 'here it is correction.preset = "token_tis"'),
    (["train", "demo", "--model.path", "x"],
     "step: --model.path FOLDER, and where the file has a [model.config] also --model"),
    (["import-gguf", "OUT", "--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: no such file"),
    (["train", "demo", "--optim", "lr=1"],
     "--optim: a section of settings, not one setting: give --optim.KEY VALUE"),
    (["train", "demo", "--optim.lr="], 'a number, got "" (a string); only an optional setting can be empty'),
    (["train", "demo", "--run.trackers", "wandb"], """got "wandb" (a string); as a list: '["wandb"]'"""),
    (["train", "demo", "--train.updates_per_step", "3"], "next step: set train.updates_per_step to 2 or 4"),
    (["train", "demo", "--dry-run", "--task.options.operands", "30"],
     "task.options.operands: must be at most 4, got 30"),
    (["train", "demo", "--correction.lower", "2", "--correction.upper", "1"],
     "jaxfp8rl: --correction.lower: correction.lower, correction.upper = [2.0, 1.0] are reversed; write "
     "[1.0, 2.0]"),
    (["train", "runs/nowhere"], "runs/nowhere: no such file, run directory or shipped preset\n"),
    (["train", "kept/firts"], 'shipped preset (did you mean "kept/first"?)'),
    (["report", "kept/firts"], 'kept/firts is no run directory (did you mean "kept/first"?)'),
    (["export", "kept/firts", "OUT"], 'kept/firts is no run directory (did you mean "kept/first"?)'),
    (["export", "RUN", "OUT", "--format", "fp4"], '--format: "fp4" is not a choice (did you mean "nvfp4"?)'),
    (["report"], "jaxfp8rl: RUN: missing\n  next step: jaxfp8rl report [-h] [--out FILE] RUN [RUN ...]"),
    (["import-gguf", "a.gguf", "OUT"],
     "OUT: unexpected argument\n  next step: jaxfp8rl import-gguf [-h] [--gguf FILE"),
    (["import-gguf", "OUT", "--package", "nowhere"], "jaxfp8rl: "),
    (["serve-training", "demo"], "needs sft.steps = 0\n  next step: --sft.steps 0; docs/tinker.md"),
    (["config", "--find", "mismatch/k3"], "next step: docs/metrics.md explains the metrics"),
    (["report", "RUN", "--out", "nowhere/x.html"], "--out nowhere/x.html: not a file in an existing folder"),
])
def test_a_slip_on_the_command_line_leaves_with_2_and_the_way_on(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("mine")
    for folder in ("RUN", "kept/first"):
        Path(folder).mkdir(parents=True)
    Path("kept/first/config.toml").touch()
    Path("RUN/metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "time/step_s": 1.0}\n')
    assert main(words) == 2
    assert says in capsys.readouterr().err and not {"OUT", "nowhere"} & {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("cache", ["kv_cache_gib", "gpu_memory_utilization"])
def test_a_plan_needs_the_model_configuration_alone(cache, tmp_path, capsys):
    """And says of the engine's part where it is not known. A run needs more, which is refused below the
    plan."""
    (tmp_path / "config.json").write_text(json.dumps(qwen3("0.6b")))
    words = ["--rollout.engine", "vllm", f"--rollout.{cache}", "0.5", "--model.config", "{}", "--model.path",
             str(tmp_path)]
    assert main(["train", "demo", "--dry-run", *words]) == 2
    out, err = capsys.readouterr()
    assert "master weights" in out and ("with vLLM\n" in out) == (cache == "kv_cache_gib")
    assert ("takes the share rollout.gpu_memory_utilization of the GPU" in out) == (cache != "kv_cache_gib")
    assert f"{tmp_path} holds neither model.safetensors nor" in err


# Fuzzing: a demo config of which a few pieces are something else. FUZZ inputs each, six times as many in
# `make test-thorough`.

FUZZ = 150
LINES = DEMO.splitlines(keepends=True)
noise = st.binary(max_size=12) | st.sampled_from([b"\x00", b"[", b"]]", b'"""', b"=", b"\xff\xfe", b"{",
                                                  b"9" * 400, b"[" * 300])


@given(cuts=st.lists(st.tuples(st.integers(0, len(DEMO)), st.integers(0, 9), noise), min_size=1, max_size=4))
@settings(max_examples=FUZZ * settings().max_examples // 10)
def test_row_36_no_bytes_crash_the_reader(tmp_path_factory, cuts):
    text = DEMO.encode()
    for at, length, put in cuts:
        text = text[:at] + put + text[at + length :]
    path = tmp_path_factory.mktemp("fuzz") / "a.toml"
    path.write_bytes(text)
    accepted_or_refused(path)


def accepted_or_refused(path: Path) -> None:
    try:
        load_config(str(path))
    except ConfigError as e:
        assert len(str(e).splitlines()) <= 25


keys = st.sampled_from([line.split(" = ")[0] for line in LINES if " = " in line and not line.startswith("#")])


odd = st.sampled_from(["nan", "-inf", "''", "[]", "{}", "0x10", "1979-05-27", "9e999", "-0", '"ä\\u0000"',
                       "[[1]]"])


@given(key=keys, value=odd)
@settings(max_examples=FUZZ * settings().max_examples // 10)
def test_row_36_no_value_crashes_the_reader(tmp_path_factory, key, value):
    path = tmp_path_factory.mktemp("fuzz") / "a.toml"
    path.write_text("".join(f"{key} = {value}\n" if line.startswith(f"{key} = ") else line for line in LINES))
    accepted_or_refused(path)
