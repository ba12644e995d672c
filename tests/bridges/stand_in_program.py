"""`vllm serve` as a program of the tests: a StandIn in a process of its own, which can be killed. Weights
come as a folder. It needs neither torch nor vLLM, so that it starts at once.

    stand_in_program.py serve MODEL --host H --port P [--seconds S] [--token-seconds S] [--exit-status N]
    [--fail]

    --seconds       what a completion takes
    --token-seconds what a token of a stream takes
    --exit-status   a request for a completion ends the process
    --fail          it ends before it serves

MODEL: "" or a file with a manifest, a JSON list of ParamMeta; then the vocabulary follows `--vocab`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from stand_in import StandIn
from written_folder import read_folder

from bridges.api import BridgeError, EngineUnhealthy, PublishFailed, WeightSource
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.proof import manifest
from bridges.served.vllm_client import VllmClient
from bridges.transports.safetensors_file import write_folder

PUBLISH = "/a_folder_of_weights"


class Served(StandIn):
    def route(self, path, body):
        if path != PUBLISH:
            return super().route(path, body)
        transport, (version, source) = FakeTransport(proof=True), read_folder(Path(body["folder"]))
        transport.open(self.engine)
        try:
            transport.publish(source, version)
        except BridgeError as e:
            return 500, {"error": str(e)}
        return 200, {}


class ByFolder:
    """A WeightTransport into such programs, as ServedTransport is into vLLM. before: is called with the
    addresses when the weights are written, and nobody has read them yet."""

    def __init__(self, token: str, urls: Sequence[str], metas, before=lambda urls: None):
        self._token, self._urls, self._metas, self._before = token, urls, tuple(metas), before
        self._client: VllmClient | None = None

    def open(self, client: VllmClient | None = None) -> None:
        self._client = client

    def expected_manifest(self):
        return self._metas

    def publish(self, source: WeightSource, version: int):
        manifest.check(source.manifest(), self._metas)
        if self._client:
            self._client.dirty = f"the publish of version {version} has not finished"
        with tempfile.TemporaryDirectory() as folder:
            write_folder(source, f"{folder}/weights", version)
            self._before(self._urls)
            for url in self._urls:
                self._post(url, f"{folder}/weights", version)
        if self._client:
            self._client.published(self._urls)
        receipt = FakeTransport(proof=True)
        receipt.open(FakeEngine(manifest=self._metas))
        return receipt.publish(source, version)

    def _post(self, url: str, folder: str, version: int) -> None:
        body = json.dumps({"folder": folder}).encode()
        asked = urllib.request.Request(url + PUBLISH, body, {"Authorization": f"Bearer {self._token}"})
        try:
            urllib.request.urlopen(asked, timeout=5).close()
        except OSError as e:
            raise PublishFailed(f"version {version} broke off: {e}") from EngineUnhealthy(f"{url}: {e}")

    def verify(self, receipt) -> None:
        """The program has proved it."""

    def close(self) -> None:
        self._client = None


def script(folder: Path) -> str:
    """The path of a script in the place of `vllm`."""
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    path.chmod(0o755)
    return str(path)


async def _die(status: int) -> None:
    os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=2)
    parser.add_argument("--host")
    for name in ("port", "vocab", "exit-status"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("seconds", "token-seconds"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    args, _ = parser.parse_known_args()
    if args.fail:
        sys.exit("no memory is free")
    model = Path(args.words[1])
    metas = tuple(map(manifest.meta_of, json.loads(model.read_text()))) if model.is_file() else ()
    die = None if args.exit_status is None else (lambda *_: _die(args.exit_status))
    engine = FakeEngine(args.vocab or 64, manifest=metas)
    server = Served(engine, fault=die, seconds=args.seconds, port=args.port, token_seconds=args.token_seconds,
                    token=Path(os.environ["JAXFP8RL_TOKEN_FILE"]).read_text())
    asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), server._loop).result()


if __name__ == "__main__":
    main()
