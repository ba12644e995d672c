"""A guarded server without vLLM: plain torch modules stand for the models of its ranks. The guard, the ranks,
the ways of bytes and the learner's transport are the real ones; uvicorn serves, as it does for vLLM."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
import types
from pathlib import Path

import torch
import uvicorn
from pausing import Pausing

from bridges.api import ParamMeta
from bridges.inside_vllm import params
from bridges.vllm_plugin import access, receiver
from bridges.vllm_plugin.guard import Guard
from bridges.vllm_plugin.rank import Rank
from bridges.vllm_plugin.receiver import Receiver

TOKEN = "a token of the tests, 32 letters"
HEAD, KV_HEADS, WIDTH, INNER, VOCABULARY = 128, 2, 256, 512, 300


class UnquantizedLinearMethod:
    """vLLM's by name: what decides about a layout are names of classes."""


class Fp8LinearMethod:
    def __init__(self):
        self.fp8_linear = type("CutlassFp8BlockScaledMMKernel", (), {})()


def kind(name: str) -> torch.nn.Module:
    """A module of a class that has vLLM's name."""
    return type(name, (torch.nn.Module,), {})()


def linear(name: str, rank: int, ranks: int, rows: int, columns: int, **more) -> torch.nn.Module:
    """FP8, with the shape that one rank holds."""
    module = kind(name)
    module.quant_method, module.tp_rank, module.tp_size = Fp8LinearMethod(), rank, ranks
    codes, scales = torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.ones(-(-rows // 128),
                                                                                   -(-columns // 128))
    module.weight = torch.nn.Parameter(codes, requires_grad=False)
    module.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    for key, value in more.items():
        setattr(module, key, value)
    return module


class Model(torch.nn.Module):
    """One layer of a decoder, as vLLM holds it on one of `ranks`."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"],
                              "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        embed, self.norm = kind("VocabParallelEmbedding"), kind("RMSNorm")
        half = -(-VOCABULARY // 64) * 64 // ranks
        stop = min((rank + 1) * half, VOCABULARY)
        embed.shard_indices = types.SimpleNamespace(org_vocab_start_index=rank * half,
                                                    num_org_elements=stop - rank * half)
        embed.org_vocab_size, embed.quant_method = VOCABULARY, UnquantizedLinearMethod()
        embed.weight = torch.nn.Parameter(torch.zeros(half, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.embed_tokens = embed
        self.norm.weight = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        copies = max(ranks // KV_HEADS, 1)
        q, kv, inner = 4 * HEAD // ranks, KV_HEADS * HEAD * copies // ranks, INNER // ranks
        self.qkv_proj = linear("QKVParallelLinear", rank, ranks, q + 2 * kv, WIDTH,
                               num_kv_head_replicas=copies,
                               output_partition_sizes=[q, kv, kv])
        self.o_proj = linear("RowParallelLinear", rank, ranks, WIDTH, q)
        self.gate_up_proj = linear("MergedColumnParallelLinear", rank, ranks, 2 * inner, WIDTH,
                                   output_partition_sizes=[inner, inner])
        self.down_proj = linear("RowParallelLinear", rank, ranks, WIDTH, inner)


def with_token(folder: Path, monkeypatch) -> None:
    """The guards that are built ask for TOKEN."""
    path = folder / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    monkeypatch.setenv(access.TOKEN_FILE, str(path))


def without_vllm(monkeypatch) -> None:
    """The layout of a checkpoint is that of the live parameters, as it is on a GPU."""
    monkeypatch.setattr(params, "_checkpoint_tensors", lambda module: module.named_parameters(recurse=False))


def with_attention(monkeypatch) -> list[torch.nn.Module]:
    """Each receiver that is made finds a module of FP8 attention with two scales -> these modules."""
    made = []

    def places(model):
        module = kind("Attention")
        made.append(module)
        for name in "kv":
            setattr(module, f"_{name}_scale", torch.tensor(1.0))
            setattr(module, f"_{name}_scale_float", 1.0)
        return tuple(params.Place(ParamMeta(f"attn.{n}_scale", "float32", (), "kv_scale"), "attn", module,
                                  f"_{n}_scale", 0, ()) for n in "kv")

    monkeypatch.setattr(receiver, "scale_places", places)
    return made


class Engine(Pausing):
    """vLLM's EngineClient and its app, over the ranks of a model."""

    def __init__(self, ranks: int = 1, kv_scales: bool = False):
        self.models = [Model(r, ranks) for r in range(ranks)]
        self.ranks = [Rank(r, lambda r=r: Receiver(self.models[r], r, ranks, kv_scales), dict)
                      for r in range(ranks)]
        self.vllm_config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(data_parallel_size=1),
            load_config=types.SimpleNamespace(load_format="dummy_stacked"))
        self.paused, self.version, self.resets, self.between = False, "default", 0, lambda: None

    async def collective_rpc(self, method, args):
        return await asyncio.to_thread(self._each, lambda r: json.dumps(
            r.publish(self._worker(r), args[1]) if args[0] == "publish" else r.asked(*args)))

    def _each(self, call):
        """Ranks of vLLM are processes of their own."""
        with concurrent.futures.ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(call, self.ranks))

    def _worker(self, rank):
        """vLLM's worker around a rank."""
        def update(said):
            rank.receive(said)
            if "digests" in said and rank is self.ranks[-1]:
                self.between()

        return types.SimpleNamespace(start_weight_update=rank.start, update_weights=update,
                                     finish_weight_update=rank.finish)

    async def update_weight_version(self, version):
        self.version = version

    async def reset_prefix_cache(self, running, connector):
        self.resets += 1
        return True

    async def app(self, scope, receive, send):
        if scope["type"] != "http":
            return
        message = await receive()
        said = await asyncio.to_thread(self._step, scope["path"], json.loads(message.get("body") or b"{}"))
        body = json.dumps(said).encode()
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    def _step(self, path, body):
        each = {"/init_weight_transfer_engine": lambda r: r.connect(body["init_info"]),
                "/start_weight_update": lambda r: r.start(), "/finish_weight_update": lambda r: r.finish(),
                "/update_weights": lambda r: r.receive(body["update_info"])}.get(path, lambda r: None)
        self._each(each)
        self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
        self.version = body.get("weight_version", self.version)
        return {"weight_version": self.version}


@contextlib.contextmanager
def serving(engine: Engine):
    """The address of `engine` behind a guard, whose token the environment names."""
    guard = Guard(engine.app)

    async def app(scope, receive, send):
        scope["app"] = types.SimpleNamespace(state=types.SimpleNamespace(
            engine_client=engine, args=types.SimpleNamespace(api_server_count=1)))
        await guard(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def metas(ranks: int = 1) -> tuple[ParamMeta, ...]:
    return params.expected_manifest(Model(0, ranks))


