"""A guarded server whose engine is the FakeEngine: its tensors are the FakeEngine's own bytes, which the
receiver of the plugin writes and proves. Guard, ranks, ways of bytes, transport and client are the real
ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path

import torch
from faulty_engine import FaultyEngine
from plugin_server import TOKEN, Engine, UnquantizedLinearMethod, kind, serving, with_token, without_vllm
from stand_in import GENERATE, asked, vllm_answer

from bridges.conformance import EngineUnderTest
from bridges.engines.fake_engine import EMBED, HEAD, FakeEngine
from bridges.served.served_transport import ServedTransport
from bridges.served.vllm_client import Deadlines, VllmClient
from bridges.sources.array_source import random_source
from bridges.vllm_plugin.rank import Rank
from bridges.vllm_plugin.receiver import Receiver

QUICK = Deadlines(connect=2.0, generate=5.0, call=5.0, down=2.0)


def model_of(engine: FakeEngine) -> torch.nn.Module:
    """vLLM's modules of an embedding and a head, over the memory of the engine's tensors."""
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    for parent, name, key in ((model.model, "embed_tokens", EMBED), (model, "lm_head", HEAD)):
        module, weight = kind("VocabParallelEmbedding"), torch.from_numpy(engine.weight(key))
        module.org_vocab_size, module.quant_method = len(weight), UnquantizedLinearMethod()
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(parent, name, module)
    return model


class Bigram(Engine):
    """vLLM's EngineClient and its app over a FakeEngine, which advances by a token every `seconds`.

    A pause freezes the requests in flight; they go on at the weights of the moment.
    """

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.fake, self.seconds, self._done = FaultyEngine(), seconds, {}
        said = self.fake.capabilities()
        about = {"engine_version": "0", "max_model_len": said.max_model_len, "vocab_size": said.vocab_size,
                 "routed_experts": False, "formats": dataclasses.asdict(said.formats)}
        model = model_of(self.fake)
        self.ranks = [Rank(0, lambda: Receiver(model, 0, 1, False), lambda: about)]

    async def reset_prefix_cache(self, running, connector):
        self.fake._cache.clear()
        return await super().reset_prefix_cache(running, connector)

    async def app(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == GENERATE:
            message = await receive()
            said = await self._sampled(json.loads(message["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(said).encode()})
        else:
            await super().app(scope, receive, send)

    async def _sampled(self, body: dict) -> dict:
        request = asked(body, str(id(body)))
        self.fake.submit([request])
        while request.request_id not in self._done:
            await asyncio.sleep(self.seconds)
            if not self.paused:
                self._done |= {done.request_id: done for [done] in self.fake.poll()}
        return vllm_answer(self._done.pop(request.request_id), 0, request.sampling.support)

    async def update_weight_version(self, version):
        await super().update_weight_version(version)
        self.fake.state.commit(int(version), "proved")


@contextlib.contextmanager
def published_to(folder: Path, monkeypatch, way: str = "shared_memory", seconds: float = 0.0, **options):
    """A client, and a transport into a Bigram, under test. `e.real`: the FakeEngine; `e.server`: the
    Bigram."""
    with_token(folder, monkeypatch)
    without_vllm(monkeypatch)
    engine = Bigram(seconds)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(engine))
        client = stack.enter_context(contextlib.closing(VllmClient([url], TOKEN, QUICK)))
        transport = ServedTransport(TOKEN, way, folder=folder, **options)
        stack.enter_context(contextlib.closing(transport)).open(client)
        metas = engine.fake.expected_manifest()
        e = EngineUnderTest(client, transport, lambda seed: random_source(metas, seed, 1.0))
        e.real, e.server = engine.fake, engine
        yield e
