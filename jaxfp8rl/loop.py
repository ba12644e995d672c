"""The other page: sample prompts -> generate -> score -> pack -> step -> publish -> save -> log.

A step samples at the weights of the step before (`weights/version` = step - 1), learns from what it sampled, and publishes.
Everything random is drawn from (run.seed, step), so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bridges.api import PublishReceipt
from jaxfp8rl import rollouts
from jaxfp8rl.build import Parts, build
from jaxfp8rl.config import Config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.flops import mfu, update_flops
from jaxfp8rl.gate import check_gate
from jaxfp8rl.memory_fit import check_memory, explained
from jaxfp8rl.monitors.summary import write_summary
from jaxfp8rl.optim import init_state
from jaxfp8rl.policy import shared
from jaxfp8rl.precision.checks import check_finite, kv_fp8_warning
from jaxfp8rl.precision.hardware import computed_by
from jaxfp8rl.publish import LearnerWeights
from jaxfp8rl.run_directory import Clock, RunDirectory, StopSignals, check_run_directory, peak_memory_gib
from jaxfp8rl.sft import warm_start
from jaxfp8rl.types import Params, TrainBatch, TrainState
from jaxfp8rl.update import learn, probe, score

EVAL_STEP = 2**31  # evaluation draws its seeds from here on, apart from training's


def train(cfg: Config, resume: bool = False) -> None:
    """Run `cfg` to its last step, from the newest checkpoint of its run directory when `resume`.

    Raises UserError and BridgeError kinds with their next step; leaves with exit code 130 after SIGINT or SIGTERM, when the
    step in progress has been finished and saved.
    """
    cfg.check()
    check_run_directory(cfg, resume)
    check_memory(cfg)
    with explained(cfg), contextlib.closing(build(cfg)) as parts, RunDirectory(cfg, resume) as run, StopSignals() as stop:
        run.note(computed_by(parts.precision))
        if warning := kv_fp8_warning(parts.model, parts.engine.capabilities().formats):
            run.note(warning)
        state, step = restore(parts, run) if resume else (begin(parts, run), 0)
        _, policy = hand_over(parts, state, with_scales(parts, parts.policy(state.params)), step)
        facts = gate(parts, policy, step)
        if not resume:
            run.log({"step": 0, "weights/version": 0, **facts, **evaluate(parts, 0)})
        while step < cfg.run.steps and not stop.requested:
            step += 1
            with run.profiled(step == cfg.monitor.profile_step):
                state, policy, metrics, sampled = one_step(parts, run, state, policy, step)
            if step == cfg.run.steps or (cfg.run.eval_every and step % cfg.run.eval_every == 0):
                metrics |= evaluate(parts, step)
            run.log(metrics, samples=sampled)
            if cfg.run.save_every and (step == cfg.run.steps or step % cfg.run.save_every == 0 or stop.requested):
                save(parts, run, state, step)
    if stop.requested and step < cfg.run.steps:
        raise SystemExit(stop.exit_code)
    write_summary(cfg.run.dir)


def with_scales(parts: Parts, policy: Params) -> Params:
    """The policy with scales for FP8 attention where they are calibrated: before the first step, on prompts alone."""
    if parts.kv_scales is None:
        return policy
    if parts.kv_scales.amax is None:
        prompts = [p.token_ids for p in parts.train[: parts.cfg.rollout.prompts_per_step]]
        parts.kv_scales.score(policy, pack_samples(parts, [Sample(p[:-1], p[-1:], np.zeros(1), 0.0) for p in prompts]))
    return parts.kv_scales.apply(policy)


def begin(parts: Parts, run: RunDirectory) -> TrainState:
    """Fresh optimiser state around the initial parameters, after the supervised warm start if the config has one; saved as
    step 0, so that whatever stops the run later leaves something to resume."""
    params = parts.initial_params()
    check_finite(params, parts.model)
    if parts.cfg.sft.steps:
        params = warm_start(parts.cfg, parts.model, params, parts.task, parts.train, parts.tokenizer, run.note)
    fresh = init_state(params, parts.optimizer, parts.precision.compute_dtype)
    state = parts.layout.place(fresh)  # committed, as restored: the same programs
    if parts.cfg.run.save_every:
        save(parts, run, state, 0)
    if parts.cfg.loss.kl_coef:
        run.save_reference(parts.model, params, parts.cfg.precision.weight_dtype)
        parts.hold_reference(run.load_reference(parts.model))
    return state


def restore(parts: Parts, run: RunDirectory) -> tuple[TrainState, int]:
    """The newest checkpoint: state, step; the prompt stream goes back to where it was and later metrics are forgotten.

    Raises CheckpointError, the run directory untouched, when the checkpoint is of another model, other data or another seed.
    """
    like = parts.layout.place(init_state(parts.initial_params(), parts.optimizer, parts.precision.compute_dtype))
    state, loop, step = run.restore(like)
    seed = parts.cfg.run.seed
    if loop["seed"] != seed:
        raise CheckpointError(f"run.seed = {seed}, the checkpoint was taken with {loop['seed']}", "resume with the same seed")
    parts.stream = PromptStream.from_state(parts.train, loop["stream"])
    if parts.cfg.loss.kl_coef:
        parts.hold_reference(run.load_reference(parts.model))
    if parts.calibration and "clip" in loop:
        parts.calibration.clip = tuple(map(np.float32, loop["clip"]))
    if parts.kv_scales:
        parts.kv_scales.amax = {name: jnp.asarray(x, jnp.float32) for name, x in loop["kv_amax"].items()}
    check_finite(state.params, parts.model, "the checkpoint")
    run.rewind(step)
    return state, step


def save(parts: Parts, run: RunDirectory, state: TrainState, step: int) -> None:
    clip = {"clip": [float(x) for x in parts.calibration.clip]} if parts.calibration else {}
    seen = {n: np.asarray(x).tolist() for n, x in (parts.kv_scales.amax or {}).items()} if parts.kv_scales else {}
    loop = {"stream": parts.stream.state(), "seed": parts.cfg.run.seed, "kv_amax": seen}
    run.save(step, state, loop | clip)


def one_step(
    parts: Parts, run: RunDirectory, state: TrainState, policy: Params, step: int
) -> tuple[TrainState, Params, dict, list[dict]]:
    """One rollout batch, its updates and a publish -> (state, its policy, the step's metrics, samples to look at)."""
    cfg, clock = parts.cfg, Clock()
    batch = collect(parts, step, clock)
    if cfg.rollout.sleep != "off":
        parts.engine.sleep()  # until `publish` wakes it
    with clock("score"):
        samples = split(batch, parts)
        packed = [pack_samples(parts, s) for s in samples]
        scored = jax.block_until_ready([score(parts, policy, p) for p in packed])
    with clock("update"):
        lr = float(parts.schedule(state.step))
        state, policy, updates = learn(parts, run, state, policy, step, packed, scored)
        policy = with_scales(parts, policy)
    if cfg.monitor.precision_every and step % cfg.monitor.precision_every == 0:
        updates |= probe(parts, run, state, packed[0], step)
    with clock("publish"):
        receipt, policy = hand_over(parts, state, policy, step)
    metrics = {
        "step": step, "weights/version": step - 1, "lr": lr, **batch.metrics(), **updates, **clock.metrics(),
        "publish/bytes": receipt.bytes, "engine/healthy": int(parts.engine.health().ok), "memory/peak_gib": peak_memory_gib(),
    }  # fmt: skip
    if parts.kv_scales:
        metrics |= parts.kv_scales.metrics()
    metrics["tokens/rollout_per_s"] = metrics["tokens/rollout"] / metrics["time/rollout_s"]
    metrics["tokens/update_per_s"] = metrics["tokens/update"] / metrics["time/update_s"]
    if share := mfu(update_flops(parts.model, sum(samples, [])), metrics["time/update_s"], cfg.train.fsdp):
        metrics["mfu/update"] = share
    return state, policy, metrics, sample_rows(batch, step, cfg.run.samples_per_step)


def collect(parts: Parts, step: int, clock: Clock) -> rollouts.Rollouts:
    """Sample and score a batch of prompts; under dynamic sampling further ones, until enough groups have rewards that differ."""
    cfg, rounds = parts.cfg, []
    for again in range(cfg.loss.dynamic_sampling_rounds):
        with clock("rollout"):
            prompts = parts.stream.next(cfg.rollout.prompts_per_step)
            n, seed = cfg.rollout.samples_per_prompt, cfg.run.seed
            requests = rollouts.make_requests(prompts, parts.sampling, n, seed, step, again)
            kept, rejected = rollouts.generate(parts.engine, prompts, requests, version=step - 1)
        with clock("reward"):
            groups = tuple(rollouts.score(kept, parts.tokenizer, parts.rewards))
        rounds.append(rollouts.Rollouts(groups, rejected, groups))
        if len(rollouts.choose(rounds, cfg.rollout.prompts_per_step).chosen) == cfg.rollout.prompts_per_step:
            break
    return rounds[0] if cfg.loss.dynamic_sampling_rounds == 1 else rollouts.choose(rounds, cfg.rollout.prompts_per_step)


def hand_over(parts: Parts, state: TrainState, policy: Params, version: int) -> tuple[PublishReceipt, Params]:
    """Publish -> (receipt, the policy to go on with). With rollout.one_copy codes are made from the masters on their way to the
    engine, a layer at a time, and the policy has them there; what it had of the last version is gone before the first byte is.
    """
    if not parts.cfg.rollout.one_copy:
        return publish(parts, policy, version), policy
    receipt = publish(parts, {**state.params, "layers": (state.params["layers"],)}, version)
    return receipt, shared(policy, parts.precision, parts.transport.lend)


def publish(parts: Parts, policy: Params, version: int) -> PublishReceipt:
    """Hand the policy to the engine as `version`. What the transport has not read back already it confirms."""
    if parts.cfg.rollout.sleep != "off":
        parts.engine.wake()
    source = LearnerWeights(parts.model, policy, parts.runs, parts.cfg.precision.weight_dtype)
    receipt = parts.transport.publish(source, version)
    if not receipt.content:  # else every byte was read from the engine and found equal before the receipt was made
        parts.transport.verify(receipt)
    return receipt


def gate(parts: Parts, policy: Params, version: int) -> dict[str, float]:
    """Sample a few completions and score them with the learner. Raises GateFailed when the two disagree."""
    prompts = (parts.held_out or parts.train)[: parts.cfg.gate.completions]
    sampling = dataclasses.replace(parts.sampling, max_tokens=min(parts.cfg.gate.max_new_tokens, parts.sampling.max_tokens))
    requests = rollouts.make_requests(prompts, sampling, 1, parts.cfg.run.seed, EVAL_STEP - 1)
    kept, _ = rollouts.generate(parts.engine, prompts, requests, version)
    batch = pack_samples(parts, [Sample(p.token_ids, c[0].token_ids, c[0].logprobs, 0.0) for p, c in kept])
    return check_gate(parts.cfg.gate, batch, np.asarray(parts.score(policy, batch)), parts.tokenizer)


def evaluate(parts: Parts, version: int) -> dict[str, float]:
    """Mean reward of one greedy completion for each held-out problem; an undefined score counts as 0. Nothing when the task
    holds none out."""
    if not parts.held_out:
        return {}
    requests = rollouts.make_requests(parts.held_out, parts.greedy, 1, parts.cfg.run.seed, EVAL_STEP + version)
    kept, rejected = rollouts.generate(parts.engine, parts.held_out, requests, version)
    rewards = np.concatenate([g.rewards for g in rollouts.score(kept, parts.tokenizer, parts.rewards)])
    total = np.nan_to_num(rewards).sum() / (len(kept) + len(rejected))
    return {"eval/reward_mean": float(total), "eval/problems": len(kept) + len(rejected)}


def split(batch: rollouts.Rollouts, parts: Parts) -> list[list[Sample]]:
    """The samples of each update, groups whole and in order: never more than the configured share, so that the shape holds."""
    size = parts.cfg.rollout.prompts_per_step // parts.cfg.train.updates_per_step
    samples = rollouts.to_samples(batch.chosen, parts.cfg.loss, parts.cfg.rollout.max_new_tokens)
    return [sum(samples[i : i + size], []) for i in range(0, max(len(samples), 1), size)]


def pack_samples(parts: Parts, samples: list[Sample]) -> TrainBatch:
    """Packed to the shape of an update; to a larger one when there are more samples than that holds (the gate's)."""
    t = parts.cfg.train
    needed = microbatches_needed(len(samples), parts.cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
    return pack(samples, t.row_tokens, t.rows_per_microbatch, max(needed, parts.microbatches))


def sample_rows(batch: rollouts.Rollouts, step: int, count: int) -> list[dict]:
    """The first completion of `count` groups, for samples.jsonl."""
    return [
        {"step": step, "id": g.prompt.problem.id, "prompt": g.prompt.problem.prompt, "completion": g.texts[0],
         "answer": g.prompt.problem.answer, "reward": float(g.rewards[0]), "tokens": len(g.completions[0].token_ids),
         "finish_reason": g.completions[0].finish_reason}
        for g in batch.groups[:count]
    ]  # fmt: skip
