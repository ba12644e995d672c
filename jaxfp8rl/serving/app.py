"""The routes of the Tinker API that this server has, as a FastAPI application. Requests are read with the
client's own types, so that a field that the client does not know is refused by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from tinker import types

from jaxfp8rl.serving.futures import Answer
from jaxfp8rl.serving.guard import LARGEST_BODY, Guard, TooLarge
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.sampler import Draw
from jaxfp8rl.serving.saved import BASE, place_of
from jaxfp8rl.serving.service import Service
from jaxfp8rl.serving.wire import turn_of_pass

TICK_S = 1.0
API = "/api/v1"
NOT_SAMPLED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs",
               "prompt_alt_tokens_k",
               "record_stability_info", "base_model", "model_path")
UNSTABLE = ("leave it out; it is for the loss stable_reinforce, which this server does not compute: a recipe "
            "of tinker-cookbook that asks for it runs with loss_fn=importance_sampling")
M = TypeVar("M", bound=BaseModel)


class WeightsInfo(BaseModel):
    """The client has no type for it."""

    tinker_path: str


class Turn(BaseModel):
    """What a request of a model says about its order. All else in the body is ignored."""

    model_id: str
    seq_id: int


def read(kind: type[M], body: bytes) -> M:
    """The body as one of the client's types. Raises Refused, which names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(f"{kind.__name__}: {where}: {first['msg']}",
                      "send such a value (NaN and infinity arrive as null), by the `tinker` client that "
                      "docs/tinker.md names", 422) from e


def turn_of(body: bytes, error: Refused) -> Turn:
    """The turn of a body that was refused with `error`. Raises that error if the body names none."""
    try:
        return Turn.model_validate_json(body)
    except ValidationError:
        raise error from None


def make_app(service: Service, token: str = "", largest_body: int = LARGEST_BODY) -> Any:
    """The ASGI application of a service, behind its guard. It closes the service when it ends."""
    app = FastAPI(lifespan=_lifespan(service), openapi_url=None)
    app.exception_handler(Refused)(lambda request, e: JSONResponse(e.body(), e.status))
    app.exception_handler(404)(_no_route)
    app.exception_handler(405)(_no_route)
    _session_routes(app, service)
    _training_routes(app, service)
    _sampling_routes(app, service)
    _saved_routes(app, service)
    return Guard(app, token, largest_body)


def _lifespan(service: Service) -> Callable:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def tick() -> None:
            while True:
                service.tick()
                await asyncio.sleep(TICK_S)

        task = asyncio.create_task(tick())
        yield
        task.cancel()
        await asyncio.to_thread(service.close)

    return lifespan


async def _no_route(request: Request, error: Any) -> Response:
    path = request.url.path
    doubled = API in path and not path.startswith(API)
    body = Refused(f"{request.method} {path}: this server has no such route",
                   f"give http://HOST:PORT as base_url, without {path.partition(API)[0]}" if doubled
                   else "docs/tinker.md lists what is served").body()
    return JSONResponse(body, 404)


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.content_type)


def _session_routes(app: FastAPI, service: Service) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> dict:
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def config() -> dict:
        return {}  # the client's defaults: plain keys, bodies that are not compressed, one future a request

    @app.post(f"{API}/client/dynamic_config")
    async def dynamic_config() -> dict:
        return {}

    @app.post(f"{API}/telemetry")
    async def telemetry() -> dict:
        return {"status": "accepted"}  # nothing of it is kept

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict:
        learner = service.learner
        model = {"model_name": learner.name, "max_context_length": learner.sampler.longest, "trainable": True,
                 "sampleable": True}
        return {"supported_models": [model]}

    @app.post(f"{API}/create_session")
    async def create_session(request: Request) -> dict:
        read(types.CreateSessionRequest, await request.body())
        return {"type": "create_session", **service.create_session()}

    @app.post(f"{API}/session_heartbeat")
    async def heartbeat(request: Request) -> dict:
        service.heartbeat(read(types.SessionHeartbeatRequest, await request.body()).session_id)
        return {"type": "session_heartbeat"}

    @app.post(f"{API}/sessions/{{session_id}}/finish")
    async def finish(session_id: str) -> dict:
        service.finish(session_id)
        return {}

    @app.post(f"{API}/retrieve_future")
    async def retrieve(request: Request) -> Response:
        asked = read(types.FutureRetrieveRequest, await request.body())
        return _response(await service.futures.answer(asked.request_id))


def _training_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_model")
    async def create_model(request: Request) -> dict:
        asked = read(types.CreateModelRequest, await request.body())
        return {"request_id": service.create_model(asked)}

    @app.post(f"{API}/get_info")
    async def get_info(request: Request) -> dict:
        model_id = read(types.GetInfoRequest, await request.body()).model_id
        service.model(model_id)
        return {"type": "get_info", "model_id": model_id, **service.learner.lora(),
                "model_name": service.learner.name, "model_data": service.learner.info()}

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request) -> dict:
        try:
            body = await request.body()
        except TooLarge as e:
            if (turn := turn_of_pass(e.head)) is None:
                raise
            return {"request_id": service.refuse(turn, b"too large", e)}
        return {"request_id": service.forward_backward(body)}

    def in_order(path: str, kind: Any, submit: Callable[[Any, bytes], str]) -> None:
        @app.post(f"{API}/{path}")
        async def route(request: Request) -> dict:
            body = await request.body()
            try:
                asked = read(kind, body)
            except Refused as e:
                return {"request_id": service.refuse(turn_of(body, e), body, e)}
            return {"request_id": submit(asked, body)}

    in_order("optim_step", types.OptimStepRequest, service.optim_step)
    in_order("save_weights", types.SaveWeightsRequest, service.save_state)
    in_order("load_weights", types.LoadWeightsRequest, service.load_weights)
    in_order("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, service.save_for_sampler)


def _sampling_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict:
        asked = read(types.CreateSamplingSessionRequest, await request.body())
        return {"type": "create_sampling_session",
                "sampling_session_id": service.create_sampling_session(asked)}

    @app.post(f"{API}/join_sampling_session")
    async def join(request: Request) -> dict:
        asked = read(types.JoinSamplingSessionRequest, await request.body())
        return {"type": "join_sampling_session",
                "client_counter": service.join_sampling_session(asked.sampling_session_id)}

    @app.get(f"{API}/samplers/{{sampler}}")
    async def sampler(sampler: str) -> dict:
        path = service.sampler(sampler)
        return {"sampler_id": sampler, "base_model": service.learner.name,
                "model_path": path if path.startswith("tinker:") else None}

    @app.post(f"{API}/asample")
    async def asample(request: Request) -> dict:
        asked = read(types.SampleRequest, await request.body())
        name, sequences = service.sample(asked, draw_of(asked, service.learner.sampler.longest))
        return {"request_id": name, "sample_sequence_ids": sequences}


def draw_of(asked: Any, longest: int) -> Draw:
    """The client's SampleRequest. `longest`: tokens of a prompt and its completion. Raises Refused, which
    names the field, for what this server does not do."""
    for name in NOT_SAMPLED:
        if getattr(asked, name):
            raise Refused(f"sample: {name} is not supported", UNSTABLE if name == "record_stability_info"
                          else "leave it out; docs/tinker.md lists what is served")
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise Refused("sample: without a sampling session", "make a SamplingClient first")
    prompt: list[int] = []
    for chunk in asked.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"sample: a chunk of kind {chunk.type!r}: this server's models read text alone",
                          "send EncodedTextChunks")
        prompt += chunk.tokens
    p = asked.sampling_params
    stop = [p.stop] if isinstance(p.stop, str) else p.stop
    strings = tuple(s for s in stop or () if isinstance(s, str))
    tokens = None if stop is None else tuple(s for s in stop if not isinstance(s, str))
    if "" in strings:
        raise Refused('sample: stop holds "", at which every completion would end', "leave it out")
    max_tokens = p.max_tokens if p.max_tokens is not None else max(longest - len(prompt), 1)
    last = asked.prompt_logprobs_last_n if asked.prompt_logprobs_last_n is not None else len(prompt) - 1
    return Draw(tuple(prompt), asked.num_samples, max_tokens, p.temperature, 0 if p.top_k == -1 else p.top_k,
                p.top_p,
                p.seed, tokens, strings, last if asked.prompt_logprobs else None)


def _saved_routes(app: FastAPI, service: Service) -> None:
    def facts(path: str) -> dict:
        return {"user_metadata": {}} if path == BASE else service.learner.saved.check(place_of(path))

    @app.post(f"{API}/weights_info")
    async def weights_info(request: Request) -> dict:
        facts(read(WeightsInfo, await request.body()).tinker_path)
        return {"base_model": service.learner.name, **service.learner.lora()}

    @app.get(f"{API}/training_runs/{{model_id}}")
    async def training_run(model_id: str) -> dict:
        last = service.learner.saved.newest(model_id)
        if last is None:
            service.model(model_id)
        return {"training_run_id": model_id, "base_model": service.learner.name, "model_owner": "local",
                **service.learner.lora(), "last_request_time": last or "1970-01-01T00:00:00Z"}

    @app.delete(f"{API}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}")
    async def delete(model_id: str, kind: str, name: str) -> Response:
        service.learner.saved.delete(place_of(f"tinker://{model_id}/{kind}/{name}"))
        return Response(status_code=204)

