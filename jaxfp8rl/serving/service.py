"""Sessions, models and samplers of a training server. Called from the event loop's thread; all that computes
runs in the worker's thread."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxfp8rl.serving.futures import Futures
from jaxfp8rl.serving.learner import Learner
from jaxfp8rl.serving.order import Job, Order, Worker
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.sampler import Draw, Sampled, Snapshot
from jaxfp8rl.serving.saved import BASE, SAMPLER, STATE, Place, place_of
from jaxfp8rl.serving.snapshots import Snapshots
from jaxfp8rl.serving.trainer import Adam, Trainee
from jaxfp8rl.serving.wire import checked_pass, pass_bytes, read_pass, sample_bytes

SILENT_S = 180.0  # a session that says nothing for so long is over; the client speaks every 10 s
SAMPLES = "samples"  # what is sampled together by an engine that holds several adapters
PENDING = 20_000  # requests for samples that wait at once
NO_LORA = ("create_lora_training_client: this server trains all parameters, not LoRA adapters",
           f'start the server with --lora.rank R; or create_training_client_from_state("{BASE}") trains all '
           "parameters, and so does this call if the server was started with --lora-as-all-parameters")
ADAPTERS = ("this server's adapters are those of {targets}; the unembedding has none, whatever "
            "train_unembed says")
WARNING = ("this server trains all parameters: a LoRA client trains them all, too; its rank and targets "
           "have no effect, and learning rates for adapters are too high")


class Limits(NamedTuple):
    """models: how many are trained at once. snapshots: how many saved weights stay in memory. patience:
    seconds for which a request waits for those before it. together: requests sampled together."""

    models: int = 1
    snapshots: int = 3
    patience: float = 300.0
    together: int = 512
    lora_as_all_parameters: bool = False


@dataclasses.dataclass
class Model:
    session_id: str
    order: Order
    trainee: Trainee | None = None
    saves: itertools.count = dataclasses.field(default_factory=itertools.count)

    def ready(self) -> Trainee:
        """Raises Refused if the model could not be made."""
        if self.trainee is None:
            raise Refused("the model was not made: see the error of its creation", "create another one")
        return self.trainee


class Service:
    """A server's state. `say(error)` is told of errors that are not a client's."""

    def __init__(self, learner: Learner, limits: Limits, say: Callable[[BaseException], None]):
        self.learner, self.limits = learner, limits
        self.futures, self._worker = Futures(say), Worker(limits.together)
        self._sessions: dict[str, float] = {}
        self._models: dict[str, Model] = {}
        # sampling session -> the path of its weights, "" for the base, "-" gone
        self._samplers: dict[str, str] = {}
        self._snapshots = Snapshots(limits.snapshots, learner.snapshot)
        self._clones: dict[str, itertools.count] = {}

    def close(self) -> None:
        self._worker.close()
        self.learner.close()

    # Sessions

    def create_session(self) -> dict[str, Any]:
        session_id = str(uuid.uuid4())
        self._sessions[session_id] = time.monotonic()
        return {"session_id": session_id, "warning_message": self._warning()}

    def _warning(self) -> str | None:
        if (lora := self.learner.cfg.lora).rank:
            return ADAPTERS.format(targets=", ".join(lora.targets))
        return WARNING if self.limits.lora_as_all_parameters else None

    def heartbeat(self, session_id: str) -> None:
        """Raises Refused(410) for a session that is over."""
        if session_id not in self._sessions:
            raise Refused(f"session {session_id!r} is unknown or over", "make another ServiceClient", 410)
        self._sessions[session_id] = time.monotonic()

    def finish(self, session_id: str) -> None:
        """End a session: its models are dropped, its saved weights stay."""
        self._sessions.pop(session_id, None)
        for model_id in [m for m, model in self._models.items() if model.session_id == session_id]:
            self._models.pop(model_id).order.fail(Refused("the session is over",
                                                          "make another ServiceClient"))
        for sampler in [s for s in self._samplers if s.startswith(f"{session_id}:")]:
            self._samplers.pop(sampler)
            self._snapshots.drop(sampler)
            self._clones.pop(sampler, None)
        self.futures.end(session_id)

    def tick(self) -> None:
        """Called now and then: ends what is over."""
        now = time.monotonic()
        for model in self._models.values():
            model.order.give_up(now)
        for session_id in [s for s, seen in self._sessions.items() if now - seen > SILENT_S]:
            self.finish(session_id)

    # Models

    def create_model(self, request: Any) -> str:
        """Raises Refused for another base model, another optimiser, other adapters than the server's, and
        where there is no room."""
        self.learner.check_name(request.base_model)
        asked, made = request.lora_config, self.learner.new_trainee
        if asked is not None and self.learner.cfg.lora.rank:
            self.learner.check_lora(asked)
            made = functools.partial(self.learner.new_trainee, asked.seed)
        elif asked is not None and not self.limits.lora_as_all_parameters:
            raise Refused(*NO_LORA)
        self._check_optimizer(request.optimizer_config)
        return self._new_model(request.session_id, request.model_seq_id, made)

    def load_weights(self, request: Any, body: bytes) -> str:
        """Load a state into a model, or make a model of it. Raises Refused."""
        def run(model: Model) -> dict[str, Any]:
            model.ready().restore(self._loader(request.path, request.optimizer)())
            return {"path": request.path, "model_id": request.model_id}

        if request.model_id is not None:
            return self._in_order(request, body, "load", run)
        load = self._loader(request.path, request.optimizer)
        if request.optimizer_config is not None:
            self._check_optimizer(request.optimizer_config)
        if request.base_model is not None:
            self.learner.check_name(request.base_model)
        made = lambda: self.learner.trainee_of(load())
        return self._new_model(request.session_id, request.model_seq_id, made, {"path": request.path})

    def _loader(self, path: str, optimizer: bool) -> Callable[[], Any]:
        if path == BASE:
            if rank := self.learner.cfg.lora.rank:
                raise Refused(f"{BASE}: this server trains adapters of rank {rank}, not all parameters",
                              f"create_lora_training_client(base_model, rank={rank})")
            return self.learner.programs.new_state
        place = place_of(path)
        if place.kind != STATE:
            raise Refused(f"{path} was saved for sampling: it has no state to train from",
                          "save_state writes one")
        self.learner.saved.check(place)
        return functools.partial(self.learner.load_state, place, optimizer)

    def _check_optimizer(self, config: Any) -> None:
        if config.type != "adamw":
            raise Refused(f"optimizer {config.type!r}: this server has adamw", "leave optimizer out")

    def _new_model(self, session_id: str, number: int, make: Callable[[], Trainee],
                   answer: dict[str, Any] | None = None) -> str:
        self.heartbeat(session_id)
        model_id, name = f"{session_id}:train:{number}", f"{session_id}:train:{number}:0"
        if self.futures.known(name):
            return name  # the same request again
        self.tick()
        if len(self._models) >= self.limits.models:
            raise Refused(f"this server trains {self.limits.models} models at once, and has them",
                          "ServiceClient.close() gives one back; or start the server with a larger --models")
        model = self._models[model_id] = Model(session_id, Order(self._worker, self.limits.patience))

        def run(_: Any) -> list[Any]:
            try:
                model.trainee = make()
            except BaseException:
                self._models.pop(model_id, None)
                raise
            return [{"model_id": model_id, **(answer or {"type": "create_model"})}]

        self._worker.submit(Job(run, None, self.futures.add(name, Future())))
        return name

    def model(self, model_id: str) -> Model:
        """Raises Refused(404)."""
        if model_id not in self._models:
            raise Refused(f"no model {model_id!r}: its session is over, or the server was started anew",
                          "create a training client; create_training_client_from_state goes on "
                          "from saved weights",
                          404)
        return self._models[model_id]

    def _in_order(self, request: Any, body: bytes, kind: str, run: Callable[[Model], Any]) -> str:
        """Submit a request of a model under its number. A check that fails is its answer, so that the
        requests after it keep their order."""
        if request.seq_id is None:
            raise Refused(f"{kind}: without a seq_id", "number the requests of a model 1, 2, 3, ...")
        model = self.model(request.model_id)
        name = f"{request.model_id}:{request.seq_id}"
        job = Job(lambda _: [run(model)], None, Future())
        if model.order.submit(request.seq_id, kind.encode() + body, job):
            self.futures.add(name, job.future)
        return name

    def refuse(self, turn: Any, body: bytes, error: Refused) -> str:
        """Answer the request of this turn with `error`. The requests after it do not wait for its number."""
        def run(model: Model) -> Any:
            raise error

        return self._in_order(turn, body, "refused", run)

    def forward_backward(self, body: bytes) -> str:
        request = read_pass(body)

        def run(model: Model) -> bytes:
            asked = checked_pass(request, self.learner.model, self.learner.cfg.train.row_tokens)
            trainee = model.ready()
            compute = trainee.forward if request.forward_only else trainee.forward_backward
            return pass_bytes(compute(asked.loss, asked.data, asked.knobs))

        return self._in_order(request, body, "forward_backward", run)

    def optim_step(self, request: Any, body: bytes) -> str:
        def run(model: Model) -> dict[str, Any]:
            if getattr(request.optim_params, "type", "adamw") != "adamw":
                raise Refused(f"optim_step: {request.optim_params.type!r} parameters: this server has adamw",
                              "give AdamParams")
            adam = Adam(**{name: getattr(request.optim_params, name) for name in Adam._fields})
            return {"metrics": {f"{k}:mean": v for k, v in model.ready().optim_step(adam).items()}}

        return self._in_order(request, body, "optim_step", run)

    def save_state(self, request: Any, body: bytes) -> str:
        def run(model: Model) -> dict[str, Any]:
            name = request.path or f"{next(model.saves):06d}"
            place = Place(request.model_id, STATE, name)
            path = self.learner.save(place, model.ready().state, request.overwrite, request.user_metadata)
            return {"path": path, "type": "save_weights"}

        return self._in_order(request, body, "save_state", run)

    def save_for_sampler(self, request: Any, body: bytes) -> str:
        def run(model: Model) -> dict[str, Any]:
            if request.kind != "snapshot":
                raise Refused(f"save_weights_for_sampler: kind {request.kind!r}: this server has "
                              f"snapshots alone",
                              'leave kind out, or give kind="snapshot"')
            answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
            policy = model.ready().policy
            if request.path is not None:
                place = Place(request.model_id, SAMPLER, request.path)
                path = self.learner.save(place, self.learner.programs.own(policy), False,
                                         request.user_metadata)
                self._snapshots.keep(path, Snapshot(policy))
                return answer | {"path": path}
            sampler = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
            self._samplers[sampler] = "-"
            self._snapshots.keep(sampler, Snapshot(policy))
            return answer | {"sampling_session_id": sampler}

        return self._in_order(request, body, "save_weights_for_sampler", run)

    # Samplers

    def create_sampling_session(self, request: Any) -> str:
        self.heartbeat(request.session_id)
        if request.base_model is not None:
            self.learner.check_name(request.base_model)
        path = request.model_path or ""
        if path:
            place = place_of(path)
            if place.kind != SAMPLER:
                raise Refused(f"{path} is a state to train from, not weights for sampling",
                              "save_weights_for_sampler writes those")
            self.learner.saved.check(place)
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._samplers[sampler] = path
        return sampler

    def join_sampling_session(self, sampler: str) -> int:
        self.sampler(sampler)
        return next(self._clones.setdefault(sampler, itertools.count(1)))

    def sampler(self, sampler: str) -> str:
        """The path of a sampling session's weights. Raises Refused(404)."""
        if sampler not in self._samplers:
            raise Refused(f"no sampling session {sampler!r}: its session is over, or the server "
                          f"was started anew",
                          "create a sampling client", 404)
        return self._samplers[sampler]

    def sample(self, request: Any, draw: Draw) -> tuple[str, list[str]]:
        """The request's name, and the names of its sequences. Raises Refused, with 429 where too many
        wait."""
        path = self.sampler(request.sampling_session_id)
        self.learner.sampler.check(draw)
        name = f"{request.sampling_session_id}:{request.seq_id}"
        sequences = [f"{name}:{i}" for i in range(draw.n)]
        if self.futures.known(name):
            return name, sequences
        if self._worker.waiting() >= PENDING:
            raise Refused(f"{PENDING} requests wait already", "ask again in a moment", 429)
        key = path if path not in ("", "-") else request.sampling_session_id if path else ""
        future = self.futures.add(name, Future())
        together = key if self.learner.sampler.at_once == 1 else SAMPLES
        self._worker.submit(Job(self._sample, (key, draw), future, together))
        return name, sequences

    def _sample(self, asked: list[tuple[str, Draw]]) -> list[Any]:
        """The answers, or the errors of weights that are gone."""
        snapshots: dict[str, Snapshot | Refused] = {}
        for key in dict.fromkeys(key for key, _ in asked):
            try:
                snapshots[key] = self._snapshots.get(key)
            except Refused as e:
                snapshots[key] = e
        pairs = [(found, draw) for key, draw in asked if isinstance(found := snapshots[key], Snapshot)]
        made = iter(self.learner.sampler.sample(pairs))
        return [e if isinstance(e := snapshots[key], Refused) else _answer(next(made)) for key, _ in asked]


def _answer(sampled: Sampled) -> bytes:
    return sample_bytes(sampled.completions, sampled.prompt_logprobs)
