"""A run with a draft head: the policy that it trains is the one without, and a resumed run goes on with the
head that it had."""

import jax
import numpy as np
import pytest
from tiny_run import config, metrics, saved

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.training import loop
from jaxfp8rl.training.draft import fresh_draft

PLAIN = {"rollout__min_num_seqs": 64, "optim__warmup_steps": 0}
HEAD = PLAIN | {"rollout__speculation": "head"}


def equal(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def draft_of(directory):
    """The state of the draft head in the newest checkpoint."""
    cfg, (state, _, _) = load_config(str(directory / "config.toml")), saved(directory)
    like = state._replace(draft=jax.eval_shape(lambda: fresh_draft(cfg, model_config(cfg))))
    place = jax.tree.leaves(state.params)[0].sharding
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
    return Checkpoints(directory / "checkpoints", 2).restore(like)[0].draft


@pytest.mark.slow
def test_a_run_is_the_one_without_a_head_and_resumes_with_it(tmp_path):
    plain, straight, resumed = (tmp_path / name for name in ("plain", "straight", "resumed"))
    loop.train(config(plain, run__steps=4, **PLAIN))
    loop.train(config(straight, run__steps=4, **HEAD))
    loop.train(config(resumed, run__steps=2, **HEAD))
    loop.train(config(resumed, run__steps=4, **HEAD), resume=True)
    (state, loop_state, _), before = saved(straight), saved(plain)
    equal(state, before[0])
    assert int(state.step) > 0, "something was learned"
    assert {k: v for k, v in loop_state.items() if k != "step"} == {k: v for k, v in before[1].items()
                                                                    if k != "step"}
    lines = zip(metrics(straight), metrics(plain), strict=True)
    for a, b in lines:
        timed = ("time/", "memory/", "publish/bytes", "tokens/rollout_per_s", "tokens/update_per_s")
        assert {k: v for k, v in b.items() if not k.startswith(timed)}.items() <= a.items()
    equal(draft_of(straight), draft_of(resumed))
    assert int(draft_of(straight).step) == 48  # 40 updates of the warm start, two of each step
    equal(saved(resumed)[0], state)
    told = metrics(straight)[1:]
    assert min(m["speculation/drafted"] for m in told) > 0
    assert told[0]["draft/logp"] > -2, "the warm start taught it: it began near -log 128"
