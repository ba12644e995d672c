import micro_run
import pytest

from jaxfp8rl.rewards.runner import RewardRunner


@pytest.fixture(scope="module")
def children(quick_children):
    """Runs, here and in processes of their own, compile quickly and have micro_run's rewards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardRunner, "score", micro_run.rewarded)
        yield
