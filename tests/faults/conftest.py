import micro_run
import pytest
import small_checkpoint

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.run.run_directory import RunDirectory


@pytest.fixture(scope="module")
def children(quick_children):
    """Runs in this process and its children compile quickly and have micro_run's rewards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardRunner, "score", micro_run.rewarded)
        yield


@pytest.fixture
def saved(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    for step in (2, 4):
        small_checkpoint.save(checkpoints, step)
    return checkpoints


@pytest.fixture
def run(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path / "run"), "--run.save_patience_s", "0.3"])
    with RunDirectory(cfg, resume=False) as run:
        run.save(2, small_checkpoint.state(2), {})
        yield run
