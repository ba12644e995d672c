"""Scores and updates of a learner that computes with the codes in the engine's memory, and of one with its
own; as a program it compares them, and says "equal"."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.update_batches import pack_samples

OPTIONS = [
    "--rollout.engine", "vllm", "--rollout.publish", "in_place", "--rollout.fp8_kernel", "emulated",
    "--rollout.kv_cache", "auto",
    "--rollout.enforce_eager", "true", "--run.dir", "unused", "--rollout.prompts_per_step", "4",
    "--rollout.samples_per_prompt", "2",
    "--model.config.num_hidden_layers", "4", "--model.config.num_key_value_heads", "2",
    "--model.config.num_attention_heads", "4",
]
ONE_COPY = ["--rollout.one_copy", "true"]


def begun(ctx: RunContext):
    """State and policy after a first publish."""
    state = init_state(jax.tree.map(lambda a: 4 * a if jnp.std(a) > 0 else a, ctx.initial_params()),
                       ctx.optimizer, "float32")
    state = jax.device_put(state, jax.local_devices()[0])  # as an update leaves it: the same programs
    return state, publishing.sync_weights(ctx, state, ctx.policy(state.params), 0)[1]


def trained(ctx: RunContext, state, policy, batch, old):
    state, policy, _ = ctx.train_step(state, policy, batch, old)
    return state, policy


def scaled(ctx: RunContext, state, policy, batch, old):
    """An update that costs no compiling: larger weights."""
    state = state._replace(params=jax.tree.map(lambda a: 1.25 * a, state.params))
    return state, ctx.policy(state.params)


def two_steps(options: list[str], update=trained) -> list[np.ndarray]:
    """old_logp, and the weights that an update makes of it, twice; and the last old_logp."""
    found = []
    with contextlib.closing(build_run(load_config("demo", [*OPTIONS, *options]))) as ctx:
        state, policy = begun(ctx)
        batch = pack_samples(ctx, [Sample(p.token_ids, (1, 2, 3), np.full(3, -2.0, np.float32), 1.0 - i % 2)
                                   for i, p in enumerate(ctx.train[:8])])
        for version in (1, 2):
            old = ctx.score(policy, batch)
            found.append(np.asarray(old))
            state, policy = update(ctx, state, policy, batch, old)
            found += [np.array(w) for w in jax.tree.leaves(state.params)]
            policy = publishing.sync_weights(ctx, state, policy, version)[1]
        found.append(np.asarray(ctx.score(policy, batch)))
    return found


def compare(update=trained) -> None:
    """Raises AssertionError where one copy gives another bit than two."""
    one, two = two_steps(ONE_COPY, update), two_steps([], update)
    assert len(one) == len(two) > 10 and (one[0] != one[-1]).any()
    for a, b in zip(one, two):
        np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    compare()
    print("equal")
