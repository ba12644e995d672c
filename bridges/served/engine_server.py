"""A rollout engine in a process of its own, asked over HTTP: `python -m bridges.served.engine_server --engine
vllm ...`.

    POST /v1/METHOD    Authorization: Bearer TOKEN    Deadline-Seconds: 600    JSON in, {"result": ...} or {"error": ...} out

`bridges.served.remote_engine.RemoteEngine` is the other side. The engine's methods run one after the other in
the thread that built the engine, so that no publish overlaps a generation; what only reads (hello, health,
weight_version) is answered at once. `begin` compares manifests and declares the engine dirty; `load` takes
weights from a folder that was written, `receive` from a link that `connect` opened (`bridges.served.links`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import os
import queue
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridges.api import (
    BridgeError,
    EngineDirty,
    EngineUnhealthy,
    ParamMeta,
    PublishFailed,
    RolloutEngine,
    WeightTransport,
)
from bridges.proof import manifest
from bridges.served import wire
from bridges.served.http_server import HttpServer, is_loopback
from bridges.served.linked import LinkedWeights
from bridges.served.links import HOST_LINKS, Link, accept
from bridges.transports.safetensors_file import FileSource
from bridges.transports.vllm_choice import check_way, open_vllm_transport

POLL_SECONDS = 0.1  # in which an end is noticed


class EngineServer:
    """Serves `engine`, published to through `transport`, which is open on it and reads the buffers that
    `convert` makes.

    The engine needs `expected_manifest()` beside the methods of RolloutEngine. `folder` is where a learner
    leaves weights: both processes see it, and nothing outside it is ever read.
    """

    def __init__(
        self, engine: RolloutEngine, transport: WeightTransport, http: HttpServer, folder: str | Path,
        convert: Callable[[np.ndarray], Any] = np.asarray,
    ):
        self._engine, self._transport, self._folder, self._convert = engine, transport, Path(folder), convert
        # version and digest of a publish that has not succeeded (yet)
        self._begun: tuple[int, str] | None = None
        self._metas: tuple[ParamMeta, ...] = ()  # its manifest
        self._link: Link | None = None
        # a signal may put, too
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._http = http
        self._at_once = {"hello": self._hello, "health": self._health, "weight_version": self._weight_version}
        self._in_turn = {
            "generate": self._generate, "begin": self._begin, "load": self._load, "verify": self._verify,
            "connect": self._connect, "receive": self._receive,
            "expected_manifest": lambda: wire.pack_manifest(engine.expected_manifest()),
            "pause": engine.pause, "resume": engine.resume, "sleep": engine.sleep, "wake": engine.wake,
        }

    def serve(self) -> None:
        """Answer until somebody asks to `close`; then close the engine. The engine runs in the calling
        thread."""
        self._http.answer = self._answer
        threading.Thread(target=self._http.serve_forever, args=(POLL_SECONDS,), name="http",
                         daemon=True).start()
        try:
            while job := self._next():
                job()
        finally:
            self._http.shutdown()
            self._http.server_close()
            self._transport.close()
            self._engine.close()

    def _next(self) -> Callable[[], None] | None:
        """Waits in short bits: a signal that arrives just as a wait begins is handled after it."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=POLL_SECONDS)

    def stop(self) -> None:
        """Have `serve` return once the call in progress is over."""
        self._jobs.put(None)

    def _answer(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        if method == "close":
            return self.stop()
        if method in self._at_once:
            return self._at_once[method](**arguments)
        if method not in self._in_turn:
            raise ValueError(
                f"no method {method!r}; there are {', '.join(sorted([*self._at_once, *self._in_turn, 'close']))}")
        return self._take_turn(method, arguments, seconds)

    def _take_turn(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Run it in the engine's thread. Raises EngineUnhealthy at the deadline; a call still in the queue is
        then dropped."""
        future = concurrent.futures.Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._in_turn[method](**arguments))
                except Exception as e:  # the asker's, whatever it is
                    future.set_exception(e)

        self._jobs.put(job)
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            if future.done():  # it was the engine that raised a TimeoutError
                raise
            waiting = "not begun" if future.cancel() else "not finished"
            raise EngineUnhealthy(f"{method} has {waiting} within {seconds:.1f} s",
                                  "give it a longer deadline") from None

    def _hello(self) -> dict[str, Any]:
        capabilities = dataclasses.asdict(self._engine.capabilities())
        return {"protocol": wire.PROTOCOL, "capabilities": capabilities, "folder": str(self._folder),
                "pid": os.getpid()}

    def _health(self) -> dict[str, Any]:
        return dataclasses.asdict(self._engine.health())

    def _weight_version(self) -> int | None:
        return None if self._begun else self._engine.weight_version()

    def _generate(self, requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        if self._begun:
            raise EngineDirty(f"the publish of version {self._begun[0]} has not finished",
                              "publish a full set of weights first")
        groups = self._engine.generate([wire.unpack_request(r) for r in requests])
        return [[wire.pack_completion(c) for c in group] for group in groups]

    def _begin(self, version: int, tensors: list[dict[str, Any]]) -> None:
        """Compare manifests: on ManifestMismatch the engine stays as it was, else it is dirty until the
        weights have come."""
        metas = wire.unpack_manifest(tensors)
        manifest.check(metas, self._engine.expected_manifest())
        self._begun, self._metas = (version, manifest.digest(metas)), metas

    def _load(self, version: int, digest: str, name: str) -> dict[str, Any]:
        """Publish the folder `name`, which must be what `begin` announced, and say what arrived."""
        self._require_begun(version, digest)
        if name == ".." or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a folder in {self._folder}")
        try:
            source = FileSource(self._folder / name, self._convert)
            if (source.version, source.digest) != self._begun:
                raise BridgeError(
                    f"{name} holds (version, digest) {(source.version, source.digest)}, announced {self._begun}")
        except BridgeError as e:
            raise PublishFailed(f"version {version} broke off: {e}", "publish again in full") from e
        receipt = self._transport.publish(source, version)
        self._begun = None
        return dataclasses.asdict(receipt)

    def _require_begun(self, version: int, digest: str) -> None:
        if self._begun != (version, digest):
            raise PublishFailed(f"version {version} was not begun, or another since", "publish again in full")

    def _connect(self, said: dict[str, Any]) -> None:
        """Open this end of the link that a learner offers, in the place of an earlier one."""
        known = getattr(self._transport, "links", HOST_LINKS)
        if said["kind"] not in known:
            raise BridgeError(
                f"this engine's {type(self._transport).__name__} takes weights over {' or '.join(known)}, not over "
                f"{said['kind']}",
                "choose another link; those between GPUs want --transport in_place")
        self._link = None  # before the memory of another is taken
        self._link = accept(said, self._folder)

    def _receive(self, version: int, digest: str, within: float) -> dict[str, Any]:
        """Publish what comes over the link, which must be what `begin` announced, and say what arrived."""
        self._require_begun(version, digest)
        if self._link is None:
            raise PublishFailed("there is no link to this engine, or it broke",
                                "publish again: the learner opens another")
        try:
            until = time.monotonic() + within
            receipt = self._transport.publish(LinkedWeights(self._link, self._metas, until, self._convert),
                                              version)
        except Exception:
            self._link.stop()
            self._link = None
            raise
        self._begun = None
        return dataclasses.asdict(receipt)

    def _verify(self, receipt: dict[str, Any]) -> None:
        if self._begun:
            raise PublishFailed(f"the publish of version {self._begun[0]} has not finished",
                                "publish again in full")
        self._transport.verify(wire.unpack_receipt(receipt))


def _fake(_: dict[str, Any], faults: dict[str, Any] | None = None, **options: Any) -> tuple:
    from bridges.engines.fake_engine import FakeEngine, FakeTransport, Faults

    engine, transport = FakeEngine(faults=Faults(**faults or {}), **options), FakeTransport()
    transport.open(engine)
    return engine, transport, np.asarray


def _vllm(hf_config: dict[str, Any], transport: str = "reload", **options: Any) -> tuple:
    from bridges.engines.vllm_engine import VllmEngine

    if not hf_config:
        raise BridgeError("vLLM wants to know the model", "--config config.json, of a Hugging Face folder")
    check_way(transport)
    engine = VllmEngine(hf_config, **options)
    return engine, open_vllm_transport(transport, engine), _torch_tensor


def _torch_tensor(x: np.ndarray) -> Any:
    """On the GPU where there is one: vLLM's tensors are there."""
    import torch

    tensor = torch.from_numpy(x.reshape(-1).view(np.uint8)).view(getattr(torch, x.dtype.name)).reshape(
        x.shape)
    return tensor.cuda() if torch.cuda.is_available() else tensor


ENGINES = {"fake": _fake, "vllm": _vllm}


def _options(engine: str) -> dict[str, bool]:
    """The keyword arguments that the engine is built from, and whether it cannot do without."""
    if engine == "fake":
        from bridges.engines.fake_engine import FakeEngine as Engine
    else:
        from bridges.engines.vllm_engine import VllmEngine as Engine
    parameters = inspect.signature(Engine).parameters.values()
    extra = {"transport": False} if engine == "vllm" else {}
    return extra | {p.name: p.default is p.empty for p in parameters
                    if p.name != "hf_config"}


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """What the server takes, and what is passed on to the engine."""
    parser = argparse.ArgumentParser("python -m bridges.served.engine_server", description=__doc__,
                                     add_help=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--config", type=Path, help="the model's config.json (vllm)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one")
    parser.add_argument("--allow-network", action="store_true",
                        help="listen on another address than this machine's own")
    parser.add_argument("--folder", type=Path,
                        help="where weights are left as files; default: a new one, removed at the end")
    parser.add_argument("--token-file", type=Path,
                        help=f"default: the variable {wire.TOKEN_VARIABLE}, else a new one in a file")
    parser.add_argument("--parent", type=int, help="end when the parent is no longer this process")
    known, _ = parser.parse_known_args(argv)
    parser.add_argument("-h", "--help", action="help")
    group = parser.add_argument_group(f"options of {known.engine} (JSON, or a word)")
    for name, required in _options(known.engine).items():
        group.add_argument("--" + name.replace("_", "-"), dest=f"engine_{name}", type=_value, metavar="VALUE",
                           default=argparse.SUPPRESS, required=required)
    parsed = vars(parser.parse_args(argv))
    engine = {name.removeprefix("engine_"): parsed.pop(name) for name in list(parsed)
              if name.startswith("engine_")}
    return argparse.Namespace(**parsed), engine


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _token(args: argparse.Namespace) -> tuple[str, Path | None]:
    """The token, and the file of a new one. The variable is taken out of the environment: no child needs
    it."""
    given = os.environ.pop(wire.TOKEN_VARIABLE, "")
    if args.token_file:
        return args.token_file.read_text().strip(), None
    if given:
        return given, None
    if not is_loopback(args.host):
        raise BridgeError(f"{args.host} wants a token that you chose",
                          f"set {wire.TOKEN_VARIABLE} or --token-file")
    token = secrets.token_urlsafe(32)
    descriptor, path = tempfile.mkstemp(prefix="engine-token-")  # readable by this user alone
    with os.fdopen(descriptor, "w") as f:
        f.write(token)
    return token, Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line once the engine answers: {"url", "pid", "folder"} and "token_file" where the token
    is new, or {"error": {"class", "message", "next_step"}}. Everything else, by whomever, goes to standard
    error."""
    args, options = _arguments(argv)
    ours: list[Path] = []  # to be removed at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        if args.parent is not None:
            threading.Thread(target=_end_with, args=(args.parent, ours), daemon=True).start()
        try:
            server, ready = _build(args, options, ours)
            signal.signal(signal.SIGTERM, lambda *_: server.stop())
            print(json.dumps(ready), file=out, flush=True)
            server.serve()
            return 0
        except Exception as e:
            said = {"error": wire.pack_error(e)}
        finally:
            _remove(ours)
        print(json.dumps(said), file=out, flush=True)  # last: who reads it may end this process at once
    return 1


def _build(args: argparse.Namespace, options: dict[str, Any],
           ours: list[Path]) -> tuple[EngineServer, dict[str, Any]]:
    """The server, its port taken before anything slow begins, and what to say once it answers."""
    token, token_file = _token(args)
    ours += [token_file] if token_file else []
    http = HttpServer(token, args.host, args.port, allow_network=args.allow_network)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="engine-weights-"))
    ours += [] if args.folder else [folder]
    hf_config = json.loads(args.config.read_text()) if args.config else {}
    engine, transport, convert = ENGINES[args.engine](hf_config, **options)
    ready = {"url": f"http://{args.host}:{http.server_port}", "pid": os.getpid(), "folder": str(folder)}
    ready |= {"token_file": str(token_file)} if token_file else {}
    return EngineServer(engine, transport, http, folder, convert), ready


def _end_with(parent: int, ours: list[Path]) -> None:
    """End at once, with all children, when the parent has gone, however it went: nobody is left to ask for
    anything."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    _remove(ours)
    os.kill(0 if os.getpgrp() == os.getpid() else os.getpid(), signal.SIGKILL)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
