import micro_run
import pytest

from jaxfp8rl.rewards.runner import RewardRunner


@pytest.fixture(scope="module")
def children(quick_compile):
    """Compile as quickly, and the rewards are micro_run's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setattr(RewardRunner, "score", micro_run.rewarded)
        yield
