"""Build the parts of a run from a Config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridges.api import Completion, GenRequest, RolloutEngine, SamplingParams, WeightTransport
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.seen import Questions
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.distributed.mesh import ONE, MeshLayout, make_mesh_layout
from jaxfp8rl.distributed.process_group import ALONE, ProcessGroup
from jaxfp8rl.environments.opening import open_player
from jaxfp8rl.environments.player import Generates, Player
from jaxfp8rl.errors import DataError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.monitors.spikes import SpikeCounter
from jaxfp8rl.optim.adamw import Optimizer
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.policy.adapters import OverBase, base_weights, starting_masters
from jaxfp8rl.policy.initial import fresh_state, starting_params
from jaxfp8rl.policy.policy import scales_in
from jaxfp8rl.policy.routing_replay import (
    RouteReplay,
    check_engine,
    compact,
    make_record,
    of_no_tokens,
    route_problem,
)
from jaxfp8rl.policy.shapes import microbatches_of
from jaxfp8rl.precision.jit import KeptPrograms, keep_compiled
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.rollout import support
from jaxfp8rl.rollout.drafting import Drafting
from jaxfp8rl.rollout.engines import build_engine, expected_formats, import_engine
from jaxfp8rl.rollout.explore import Explorer
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.rollout.noise import GainNoise
from jaxfp8rl.rollout.pipeline import RolloutPipeline
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.rollout.process_proxies import World, with_proxies
from jaxfp8rl.rollout.samples import make_top_k
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.rollout.served import publish_senders
from jaxfp8rl.rollout.shared_batches import SharedBatches
from jaxfp8rl.rollout.stops import Stops
from jaxfp8rl.training.ahead import KeptLowered
from jaxfp8rl.training.calibrate import ClipCalibration, KvCalibration
from jaxfp8rl.training.draft import fresh_draft
from jaxfp8rl.training.preflight import checked
from jaxfp8rl.training.programs import (
    compiled_ahead,
    has_known_shapes,
    make_programs,
    plain_precision,
)
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score
from jaxfp8rl.training.teacher import Teacher, check_teacher, open_teacher
from jaxfp8rl.types import Params, TrainBatch, TrainState


@dataclasses.dataclass
class RunContext:
    """The parts of a run that the loop uses.

    `runs`: the linears that the engine holds in FP8. `precision`: the learner's number formats and kernels.
    `policy`: quantises the masters, except under rollout.one_copy, where the codes are in the engine's
    memory. `loading`: the initial state of a run that loads it in a thread.
    """

    cfg: Config
    group: ProcessGroup
    model: ModelConfig
    tokenizer: Tokenizer
    stops: Stops
    task: Task
    train: list[Prompt]
    stream: PromptStream[Prompt]
    held_out: list[Prompt]
    contents: dict[str, str]
    questions: Questions
    rewards: RewardRunner
    engine: RolloutEngine
    transport: WeightTransport
    runs: tuple[LayerRun, ...]
    precision: Precision
    layout: MeshLayout
    logprobs: Callable
    policy: Callable
    score: Callable
    train_step: Callable
    optimizer: Optimizer
    schedule: optax.Schedule
    calibration: ClipCalibration | None
    kv_scales: KvCalibration | None
    replay: RouteReplay | None
    spikes: SpikeCounter
    top_k: Callable | None  # the likeliest tokens for samples.jsonl (run.samples_top_k)
    kept: KeptPrograms
    noise: GainNoise
    # (policy, batch) -> the reference's log-probabilities [M, R, T], for the KL term (loss.kl_coef)
    reference: Callable[[Params, TrainBatch], jax.Array] | None = None
    loading: Future[TrainState] | None = None
    playing: Player | None = None  # who plays trajectories with an environment
    explorer: Explorer | None = None  # who samples completions with drafts in FP8
    drafting: Drafting | None = None

    @property
    def player(self) -> Generates:
        """Who samples a step's completions: the engine, or with an environment who plays trajectories by
        it."""
        return self.playing or self.engine

    @functools.cached_property
    def batches(self) -> RolloutPipeline | SharedBatches:
        pipeline = RolloutPipeline(self)
        return pipeline if self.group.count == 1 else SharedBatches(self.group, pipeline, self.train)

    @property
    def sampling(self) -> SamplingParams:
        r, words = self.cfg.rollout, self.model.vocab_size
        top_k = 0 if (most := support.bound(r, words)) == words else most
        return SamplingParams(r.max_new_tokens, r.temperature, top_k, r.top_p, self.stops.token_ids,
                              self.support_width)

    @property
    def support_width(self) -> int:
        """The width of a batch's supports, in tokens; 0 if sampling is not filtered."""
        return support.width(self.cfg.rollout, self.model.vocab_size)

    @property
    def microbatches(self) -> int:
        """Micro-batches of an update in the worst case, so that its shape never changes."""
        return microbatches_of(self.cfg)

    @property
    def greedy(self) -> SamplingParams:
        """The sampling parameters of an evaluation."""
        return SamplingParams(self.cfg.rollout.max_new_tokens, 0.0, stop_token_ids=self.stops.token_ids)

    def unfit(self, request: GenRequest, completion: Completion) -> str | None:
        """Why the learner cannot use a completion although its own fields are valid, or None."""
        if request.sampling.reported and (found := support.problem(completion, request.sampling.reported)):
            return found
        return route_problem(self.model, request, completion) if self.cfg.moe.replay == "R3" else None

    def with_routes(self, samples: list[Sample]) -> list[Sample]:
        """The samples with the engine's routes, which they then have, if these are to be replayed; else
        without."""
        if self.cfg.moe.replay == "R3":
            return compact(samples, self.model)
        return [s._replace(routes=None) for s in samples]

    @property
    def no_routes(self) -> np.ndarray | None:
        """The routes of an update without samples, which has the same shape as any update; None if the
        engine's routes are not replayed."""
        return of_no_tokens(self.model) if self.cfg.moe.replay == "R3" else None

    def initial_params(self) -> Params:
        """The parameters that learn as they begin, on the learner's devices, or on one device if a warm
        start, which runs on one, comes first."""
        layout = ONE if self.cfg.sft.steps else self.layout
        return starting_masters(self.cfg, self.model, lambda: starting_params(self.cfg, self.model, layout))

    def fresh_state(self, params: Params) -> TrainState:
        state = fresh_state(params, self.optimizer, self.precision.compute_dtype, self.layout)
        return state._replace(draft=self.fresh_draft())

    def fresh_draft(self) -> TrainState | None:
        """The draft head's state before its first update; None without one."""
        return self.layout.place(fresh_draft(self.cfg, self.model))

    def first_state(self) -> TrainState:
        """The initial state of a run without a warm start or a reference. Raises ModelError for weights that
        are not finite."""
        if self.loading is None:
            state = first_state(self.cfg, self.model, self.optimizer, self.layout)
        else:
            state, self.loading = self.loading.result(), None
        return state._replace(draft=self.fresh_draft())

    def hold_reference(self, params: Params) -> None:
        """Keep `params` as the reference policy of the KL term.

        It always has its own codes, since those in the engine's memory change with each version. On several
        devices, each receives only its part of `params`.
        """
        params = params if self.layout.mesh else jax.tree.map(jnp.asarray, params)
        self._refer_to(make_policy(self.precision, layout=self.layout)(self.layout.place(params)))

    @property
    def base(self) -> dict[str, str]:
        """The folder and the digest of the base under the run's adapters; {} without adapters."""
        policy = self.policy
        return {"path": self.cfg.model.path, "digest": policy.digest} if isinstance(policy, OverBase) else {}

    @property
    def teacher(self) -> str:
        """The digest of the teacher's weights; "" without one."""
        return self.reference.digest if isinstance(self.reference, Teacher) else ""

    def hold_first_adapters(self) -> None:
        """Keep the adapters with which the run began, over its base, as the reference policy."""
        self._refer_to(self.policy(self.initial_params()))

    def _refer_to(self, held: Params) -> None:
        # with the policy's scales of FP8 attention, so that both compute the same attention
        self.reference = lambda policy, batch: self.score(held | scales_in(policy),
                                                          batch._replace(routes=None))

    def close(self) -> None:
        for part in filter(None, (self.transport, self.engine, self.rewards, self.playing, self.drafting)):
            part.close()


def ignored(phase: str) -> None:
    """A phase callback that does nothing."""


def build_run(
    cfg: Config, group: ProcessGroup = ALONE, fresh: bool = False, phase: Callable[[str], None] = ignored,
    ahead: bool = False,
) -> RunContext:
    """Assemble a run in this process of its `group`. `phase` is called with the name of each slow phase. With
    `ahead`, threads compile the programs of its steps while the engine starts, and load the weights of a
    `fresh` run.

    Raises UserErrors: those of `preflight`, the data's after those of the devices, then those of the engine.
    """
    share_gpu(cfg)  # before anything asks JAX for its devices
    phase("reading the data")
    model, runs = checked(cfg, fresh)
    kept = KeptPrograms(keep_compiled(cfg.train.compilation_cache))
    layout = make_mesh_layout(cfg.train.data, cfg.train.fsdp, cfg.train.tensor, group.count)
    # a vLLM that measures the free memory must not see what others take
    early = cfg.rollout.engine != "vllm" or cfg.rollout.kv_cache_gib is not None
    known_shapes = ahead and has_known_shapes(cfg)
    expected = expected_formats(cfg, model)
    kept_lowered = None
    if expected and early and known_shapes:
        kept_lowered = KeptLowered.of(kept.folder, cfg, model, layout)
    rewards: list[RewardRunner] = []  # of the first process

    def meanwhile(task: Task) -> None:
        """While the problems are made: import the engine's packages, and let the scorer's processes start."""
        import_engine(cfg)
        if group.first:
            rewards.append(RewardRunner(task, cfg.task.reward_timeout_s, cfg.task.reward_workers))

    with contextlib.ExitStack() as unless_open:
        unless_open.callback(lambda: [runner.close() for runner in rewards])
        data = load_data(cfg, model, meanwhile)
        check_teacher(cfg, model, data.tokenizer)
        questions = data.questions(cfg)
        check_same(group, digests := data.contents())
        programs = make_programs(cfg, model, runs, expected, layout) if expected else None
        loading = None
        if ahead and early and programs:
            if known_shapes:
                programs = compiled_ahead(programs, cfg, model, layout, kept_lowered)
            if fresh and cfg.model.path and begins_with_weights(cfg) and group is ALONE:
                loading = in_thread(functools.partial(first_state, cfg, model, programs.optimizer, layout))
        senders = publish_senders(cfg, group)
        scorer, engine, transport = with_proxies(
            group, lambda: open_world(cfg, model, runs, rewards[0], phase, senders), senders.get("outlet"))
        unless_open.pop_all()  # the run closes them
    check_engine(cfg, engine.capabilities())
    support.check_engine(cfg, engine.capabilities())
    formats = engine.capabilities().formats
    foreseen = programs is not None and programs.formats == formats
    if programs is None or not foreseen:
        programs = make_programs(cfg, model, runs, formats, layout)
    if known_shapes and not (early and foreseen):
        programs = compiled_ahead(programs, cfg, model, layout, kept_lowered if foreseen else None)
    precision, logprobs = programs.precision, programs.logprobs
    drafting = Drafting.of(cfg, model)
    policy = OverBase(programs.policy, make_policy(precision, layout=layout),
                      lambda: base_weights(cfg, model), cfg) if cfg.lora.rank else programs.policy
    reference = None
    if cfg.reference.path:
        phase("loading the teacher")
        reference = open_teacher(cfg, layout)
    return RunContext(
        cfg, group, model, data.tokenizer, data.stops, data.task, data.train,
        data.stream(cfg),
        data.held_out[: cfg.run.eval_problems], digests, questions,
        scorer, engine, transport, runs, precision, layout, logprobs,
        policy, programs.score, programs.train_step, programs.optimizer,
        make_schedule(cfg.optim, cfg.updates), make_calibration(cfg, model, layout), programs.kv_scales,
        RouteReplay(cfg, make_record(logprobs, layout)) if cfg.moe.replay != "none" else None, SpikeCounter(),
        make_top_k(model, precision, cfg.rollout.temperature, cfg.run.samples_top_k, layout)
        if cfg.run.samples_top_k else None, kept, GainNoise(cfg, model), loading=loading,
        playing=open_player(cfg, engine, data.tokenizer, data.stops.cut), reference=reference,
        drafting=drafting,
        explorer=drafting.explorer(engine, scorer, data.tokenizer) if drafting else None,
    )


def begins_with_weights(cfg: Config) -> bool:
    """Whether the masters of a fresh run are its weights as they are read, of which nothing else is made."""
    return not (cfg.sft.steps or cfg.keeps_reference)


def first_state(cfg: Config, model: ModelConfig, optimizer: Optimizer, layout: MeshLayout) -> TrainState:
    """The initial state of a run that begins with its weights. Those of a folder reach the device in the type
    that they are stored in. Raises ModelError if they are not finite."""
    params = starting_masters(cfg, model, lambda: starting_params(cfg, model, layout, "stored"))
    state = fresh_state(params, optimizer, cfg.precision.compute_dtype, layout)
    check_finite(state.params, model)
    return state


def in_thread(load: Callable[[], TrainState]) -> Future[TrainState]:
    """`load` in a thread, for which the end of the process waits."""
    with_one = ThreadPoolExecutor(1, "loader")
    try:
        return with_one.submit(load)
    finally:
        with_one.shutdown(wait=False)


def open_world(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...], rewards: RewardRunner,
               phase: Callable[[str], None], senders: dict[str, Any] | None = None) -> World:
    """The scorer, once it is ready, the engine, and the transport that carries weights to the engine. Raises
    ConfigError, before the engine starts, if the scorer cannot be loaded."""
    rewards.wait_until_ready()
    phase(f"starting the engine ({cfg.rollout.engine})")
    return rewards, *build_engine(cfg, model, runs, phase, senders)


def open_rewards(cfg: Config, task: Task, workers: int) -> RewardRunner:
    """A RewardRunner whose scorer is loaded in each of the `workers` processes. Raises ConfigError if the
    scorer cannot be loaded."""
    rewards = RewardRunner(task, cfg.task.reward_timeout_s, workers)
    try:
        rewards.wait_until_ready()
    except BaseException:
        rewards.close()
        raise
    return rewards


def check_same(group: ProcessGroup, digests: dict[str, str]) -> None:
    """Raise DataError if this process has read other problems than the first process."""
    theirs = group.broadcast(lambda: digests)

    def compare() -> None:
        for name in (name for name, digest in theirs.items() if digests[name] != digest):
            raise DataError(
                f"task: process {group.number} has other {name} than the first process: "
                "their answers or their prompts' tokens differ",
                "give all processes the same files and the same tokenizer")

    group.run_and_sync(compare)


def make_calibration(cfg: Config, model: ModelConfig, layout: MeshLayout) -> ClipCalibration | None:
    """The clip calibration, with its shadow learner without FP8, if loss.calibrate_clip_every is set."""
    if not cfg.loss.calibrate_clip_every:
        return None
    plain = plain_precision(cfg, model)
    logprobs = make_logprobs(model, plain, cfg.rollout.temperature, cfg.train.remat, layout)
    policy, score = make_policy(plain, layout=layout), make_score(logprobs, layout)
    return ClipCalibration(lambda params, batch: score(policy(params), batch), cfg.loss)

