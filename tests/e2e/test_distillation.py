"""A run whose policy learns from a teacher of another shape alone (docs/distillation.md)."""

import shutil

import jax
import numpy as np
import pytest
from micro_run import metrics, words

from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.errors import CheckpointError, ConfigError, ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.training.resume import check_same_teacher
from jaxfp8rl.training.teacher import check_teacher, open_teacher

pytestmark = pytest.mark.usefixtures("quick_compile")

ALONE = {"loss__advantage": "none", "loss__kl_coef": 1.0, "loss__kl": "k1+", "loss__kl_baseline": "true",
         "model__config__vocab_size": 16}


def folder_of(path, chars="0123456789+-*=", times=16, **changes):
    """A teacher's folder: random weights, so many times the usual size, so that it has opinions."""
    demo = load_config("demo")
    model = ModelConfig.from_hf({**demo.model.config, "vocab_size": 16, "hidden_size": 64, **changes})
    params = jax.tree.map(lambda p: times * p if p.ndim > 1 else p, init_params(model, jax.random.key(7)))
    tokens = path.with_name(f"{path.name}-tokens")
    load_tokenizer(f"chars:{chars}").save(str(tokens))
    save_params(path, model, jax.tree.map(np.asarray, params), tokenizer_from=tokens)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("teacher") / "it")


def test_a_policy_comes_nearer_to_its_teacher(teacher, tmp_path):
    options = words(tmp_path, **ALONE, reference__path=teacher, rollout__prompts_per_step=16,
                    train__rows_per_microbatch=8)
    assert main(["train", "demo", *options]) == 0
    rows = metrics(tmp_path)[1:]
    assert all(r["update/applied"] == 1 and r["tokens/update"] == r["tokens/rollout"] for r in rows)
    kl = [r["kl"] for r in rows]
    assert np.mean(kl[-2:]) < 0.85 * np.mean(kl[:2]), kl
    assert not (tmp_path / "reference").exists() and "rewards are equal" not in (tmp_path
                                                                                 / "notes.txt").read_text()


@pytest.mark.slow
def test_a_run_with_a_teacher_goes_on_after_a_resume(teacher, tmp_path, capsys):
    options = words(tmp_path, **ALONE, reference__path=teacher, run__steps=2)
    assert main(["train", "demo", *options]) == 0
    assert main(["train", str(tmp_path), "--resume", "--run.steps", "3"]) == 0
    assert [r["step"] for r in metrics(tmp_path)] == [0, 1, 2, 3] and metrics(tmp_path)[-1]["kl"] > 0
    moved, other = shutil.copytree(teacher, tmp_path / "moved"), folder_of(tmp_path / "other", times=2)
    on = ["train", str(tmp_path), "--resume", "--run.steps", "4", "--reference.path"]
    capsys.readouterr()
    assert main([*on, str(other)]) == 2
    assert "reference.path: the checkpoint was taken with a teacher of SHA-256" in capsys.readouterr().err
    assert main([*on, str(moved)]) == 0


def test_a_teacher_in_fp8_says_nearly_what_it_says_in_high_precision(tmp_path):
    """Off by the roundings of FP8, and not by nothing; one with other weights is far off."""
    folder = folder_of(tmp_path / "wide", times=1, hidden_size=128)
    other = folder_of(tmp_path / "other", times=2, hidden_size=128)
    rng = np.random.default_rng(0)
    batch = pack([Sample(rng.integers(2, 16, 4), rng.integers(2, 16, 8), np.zeros(8, np.float32), 0.0)
                  for _ in range(12)], 40, 2, 4)

    digests = {}

    def scores(path, recipe):
        cfg = load_config("demo", ["--loss.kl_coef", "1", "--reference.path", str(path), "--reference.recipe",
                                   recipe, "--model.config.vocab_size", "16"])
        opened = open_teacher(cfg, ONE)
        digests[path, recipe] = opened.digest
        return np.asarray(opened({}, batch))[batch.response_mask]

    high = scores(folder, "bf16")
    off, far = (np.abs(scores(*of) - high).mean() for of in ((folder, "fp8"), (other, "bf16")))
    assert 1e-3 < off < 0.03 and far > 0.1, (off, far)
    assert digests[folder, "fp8"] == digests[folder, "bf16"] != digests[other, "bf16"]
    check_same_teacher({}, digests[folder, "bf16"])  # of an earlier version
    for was in (digests[other, "bf16"], ""):
        with pytest.raises(CheckpointError, match="reference.path: the checkpoint was taken with"):
            check_same_teacher({"teacher": was}, digests[folder, "bf16"])


@pytest.mark.parametrize("changes, error, says", [
    ({"chars": "0123456789+-*:"}, ConfigError,
     "':' is absent here and 15 there, '=' is 15 here and absent there; 2 in all"),
    ({"vocab_size": 64}, ConfigError, "has 64 words, and the policy may sample any of 128"),
    ({"max_position_embeddings": 8}, ConfigError, r"takes 8 tokens at most, and .* = 10"),
    ({"hidden_size": 96, "intermediate_size": 96}, ConfigError, "128"),
])
def test_what_does_not_suit_the_run_is_refused_before_it_begins(tmp_path, changes, error, says):
    cfg = load_config("demo", ["--loss.kl_coef", "1", "--reference.recipe", "fp8", "--reference.path",
                               str(folder_of(tmp_path / "other", **{"vocab_size": 128} | changes))])
    with pytest.raises(error, match=says):
        check_teacher(cfg, model_config(cfg), load_tokenizer(cfg.model.tokenizer))


def test_a_folder_that_is_no_model_is_refused_by_a_dry_run(teacher, tmp_path, capsys):
    assert main(["train", "demo", "--dry-run", "--loss.kl_coef", "1", "--reference.path", str(teacher),
                 "--model.config.vocab_size", "16"]) == 0
    plan = capsys.readouterr().out
    assert f"teacher of loss.kl_coef, {teacher}" in plan and "reference policy" not in plan
    broken = shutil.copytree(teacher, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    cfg = load_config("demo", ["--loss.kl_coef", "1", "--reference.path", str(broken)])
    with pytest.raises(ModelError, match="reference.path: .*safetensors"):
        check_teacher(cfg, model_config(cfg), load_tokenizer(cfg.model.tokenizer))
