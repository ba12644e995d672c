"""A run whose engine samples with noise on its gains: what sees the noise, what does not, and that it is
drawn again."""

from pathlib import Path

import numpy as np
import pytest
from micro_run import assert_same_run, config, metrics, rewarded

from jaxfp8rl.config.resume_rules import settled
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop

# fast: tests/unit/rollout/test_noise.py
pytestmark = [pytest.mark.usefixtures("quick_children"), pytest.mark.slow]
NOISY = {
    "precision__compute_dtype": "float32", "precision__weight_dtype": "float32", "noise__start": 0.5,
    "noise__end": 0.1,
    "noise__stages": 3, "run__eval_every": 1, "run__keep_checkpoints": 9, "gate__max_mean_gap": 1e-4,
    "gate__max_gap": 1e-3, "lora__rank": 2, "optim__lr": 0.01, "model__config__hidden_size": 64,
}


def noisy(folder: Path, **changes):
    return config(folder, **(NOISY | changes))


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("noise") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardRunner, "score", rewarded)
        loop.train(noisy(folder, run__steps=6))
    return folder


def test_the_correction_sees_the_noise_and_the_evaluation_does_not(straight, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    rows = metrics(straight)[1:]
    assert [row["noise/sigma"] for row in rows] == pytest.approx([0, 0, 0.5, 0.5, 0.1, 0.1])
    k3 = np.array([row["mismatch/k3"] for row in rows])
    assert k3[:2].max() < 1e-9 < 1e-6 < k3[4:].min() and 5 * k3[4:].max() < k3[2:4].min()
    assert all(row["noise/arrived"] == pytest.approx(1, abs=1e-3) and row["noise/moved"] == 1
               for row in rows[2:])
    assert min(row["correction/weight_std"] for row in rows[2:]) > 1e-3 > rows[0]["correction/weight_std"]
    # what is evaluated after a step is what it learned, as a run shows that ends there without noise on its
    # engine
    loop.train(noisy(tmp_path, run__steps=4, noise__total_steps=6))
    ended, whole = metrics(tmp_path)[-1], rows[3]
    assert {k: v for k, v in ended.items() if k.startswith("eval/")} == {
        k: v for k, v in whole.items() if k.startswith("eval/")}
    loop.train(settled(noisy(tmp_path, run__steps=6, noise__total_steps=6)), resume=True)
    assert_same_run(tmp_path, straight)  # its gate, tight as it is, passed at version 4
