"""A process of a learner that publishes its shards of a policy, once in the learner's own FP8 codes and once
as masters that are quantised on the way, by each way in WAYS:

    python one_learner.py COUNT URL TOKEN FOLDER CONFIG WAYS    and the variables of JAX's processes

CONFIG: a config.json, all of whose linears are in FP8, or "" for the model of this file.

It says the contents of the receipts, and asserts that no array of it was larger than its shard of a leaf."""

import json
import sys
import types
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import jax

from bridges.served.outlet import Outlet
from bridges.served.served_transport import ServedTransport
from jaxfp8rl.distributed.mesh import make_mesh_layout
from jaxfp8rl.distributed.process_group import joined
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.rollout.process_proxies import _Transport
from jaxfp8rl.training.step import make_policy

ALL = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
RUNS = LayerRun(0, 1, frozenset()), LayerRun(1, 3, ALL)
WIDTH, INNER, HEAD, HEADS, VOCABULARY, LAYERS = 256, 512, 128, 4, 300, 3
MODEL = ModelConfig.from_hf(
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
     "hidden_size": WIDTH,
     "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
     "num_key_value_heads": HEADS, "head_dim": HEAD, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
     "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False})


def model_of(config):
    """(the model, its linears in FP8)."""
    if not config:
        return MODEL, RUNS
    model = ModelConfig.from_hf(json.loads(Path(config).read_text()))
    return model, (LayerRun(0, model.num_hidden_layers, ALL),)


def sources(layout, config=""):
    """The policy, and its masters."""
    model, runs = model_of(config)
    params = layout.place(init_params(model, jax.random.key(0)))
    masters = params | {"layers": (params["layers"],)}
    return [LearnerWeights(model, policy, runs, "bfloat16")
            for policy in (make_policy(Precision(runs), layout=layout)(params), masters)]


class Watched(Outlet):
    """An outlet that sees the largest array of this process at each bucket."""

    largest = 0

    def fill(self, k):
        super().fill(k)
        self.largest = max(self.largest, *(x.addressable_shards[0].data.nbytes for x in jax.live_arrays()))


def publish(group, url, token, folder, config, ways):
    outlet = Watched(group.number, folder)
    made = sources(make_mesh_layout(fsdp=2, tensor=jax.device_count() // 2, processes=group.count), config)
    for kind in ways:
        transport = ServedTransport(token, kind, urls=[url], folder=folder, slot_bytes=100_000, outlet=outlet,
                                    learners=group.serve(outlet))
        if group.first:
            transport.open()
        proxy = _Transport(group, transport if group.first else None, outlet)
        print(*(proxy.publish(source, version).content for version, source in enumerate(made, 1)), flush=True)
        group.all_reduce_max(0)
        proxy.close()
    model, _ = model_of(config)
    largest = max(model.num_hidden_layers * model.intermediate_size, model.vocab_size) * model.hidden_size * 4
    assert largest // jax.device_count() == outlet.largest, (outlet.largest, largest)


def main():
    count, url, token, folder, config, *ways = sys.argv[1:]
    cfg = types.SimpleNamespace(train=types.SimpleNamespace(processes=int(count)), model_dump=lambda mode: {})
    with joined(cfg) as group:
        publish(group, url, token, folder, config, ways)


if __name__ == "__main__":
    main()
