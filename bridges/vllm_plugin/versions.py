"""What is private to a version of vLLM: the class of the backend, a method of its workers, and its NCCL.

Run with 0.32, whose servers have the routes that the guard watches. 0.25.1 has a part of them only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from bridges.api import BridgeError
from bridges.inside_vllm.environment import FP8
from bridges.inside_vllm.formats import engine_formats
from bridges.inside_vllm.fp8_emulation import prefer
from bridges.inside_vllm.kv_scales import reset
from bridges.inside_vllm.stacks import load_format
from bridges.vllm_plugin.publishes import RPC
from bridges.vllm_plugin.rank import Rank
from bridges.vllm_plugin.receiver import Receiver

BACKEND = "jaxfp8rl"
KNOWN = ("0.32.",)
KERNEL = "JAXFP8RL_FP8_KERNEL"  # "emulated": FP8 weights on a CPU without AMX, slowly


def install() -> None:
    """Register the backend, the load format and, if asked for, the emulated kernel with vLLM, in this
    process.

    Raises BridgeError if the command line asks for the backend of a vLLM that is not known here. Otherwise
    such a vLLM is left as it is.
    """
    import vllm

    if not vllm.__version__.startswith(KNOWN):
        if any(BACKEND in word and "backend" in word for word in sys.argv):
            raise BridgeError(f"the backend {BACKEND!r} was run with vLLM {' and '.join(KNOWN)}*, "
                              f"and this is {vllm.__version__}",
                              "install vllm 0.32, or use a backend of vLLM's own: --weight-transfer-config "
                              '\'{"backend": "nccl"}\'')
        return
    load_format()
    _register_backend()
    _tell_versions()
    if (kernel := os.environ.get(KERNEL, "native")) == "emulated":
        prefer()
    elif kernel != "native":
        raise BridgeError(f"{KERNEL}={kernel}", 'set it to "native" or "emulated"')


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, engine_class())
    setattr(WorkerBase, RPC, _asked)


def _tell_versions() -> None:
    """Each event of a stream says the versions of all tokens so far; vLLM's own says them in the last."""
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState._new_completion_output
    if make.__module__ == __name__:
        return

    def telling(self: Any, *args: Any) -> Any:
        made = make(self, *args)
        made.weight_versions = self._weight_version_spans()
        return made

    RequestState._new_completion_output = telling  # pyright: ignore[reportAttributeAccessIssue]


def _asked(worker: Any, what: str, said: Any = None) -> str:
    """The method of a worker by which the guard speaks to this rank: an answer in JSON. It never raises."""
    engine = worker.weight_transfer_engine
    if type(engine).__name__ != "JaxWeights":
        return json.dumps({"rank": worker.rank,
                           "problem": f"the server runs without the backend {BACKEND!r}",
                           "next_step": "start it as docs/vllm_server.md says"})
    if what == "renew":  # vLLM 0.32 refuses a new update while one that failed is open
        worker._weight_update_active = False
    return json.dumps(engine.ours.publish(worker, said) if what == "publish" else engine.ours.asked(what))


def engine_class() -> type:
    """The WeightTransferEngine. It is defined inside a function because its base class is vLLM's."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    class JaxWeights(WeightTransferEngine):
        """A `Rank` behind vLLM's interface."""

        supports_draft_weight_update = False

        def __init__(self, *args: Any):
            super().__init__(*args)
            self.ours = Rank(self.parallel_config.rank, lambda: _receiver_of(self), lambda: _about(self))

        def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
            return init_dict

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            return update_dict

        def init_transfer_engine(self, init_info: Any) -> None:
            self.ours.connect(init_info)

        def start_weight_update(self) -> None:
            self.ours.start()

        def receive_weights(self, update_info: Any) -> None:
            self.ours.receive(update_info)

        def finish_weight_update(self) -> None:
            self.ours.finish()

        def shutdown(self) -> None:
            self.ours.close()

    return JaxWeights


def _receiver_of(engine: Any) -> Receiver:
    config = engine.parallel_config
    if config.pipeline_parallel_size > 1 or config.enable_expert_parallel:
        raise BridgeError("the engine divides its layers or experts among ranks",
                          "use --tensor-parallel-size alone")
    scaled = engine.vllm_config.cache_config.cache_dtype.startswith("fp8")
    if scaled and str(engine.vllm_config.load_config.load_format).startswith("dummy"):
        reset(engine.model)  # which random weights may have set
    return Receiver(engine.model, config.rank, config.tensor_parallel_size, scaled)


def _about(engine: Any) -> dict[str, Any]:
    """{"engine_version", "max_model_len", "vocab_size", "routed_experts", "formats"}: fields of
    `Capabilities` and `EngineFormats`. formats is None, with "formats_problem", where they are not known
    here."""
    import vllm

    model, config = engine.model_config, engine.vllm_config
    dtype = str(model.dtype).removeprefix("torch.")
    blocks = getattr(config.quant_config, "weight_block_size", None)
    cache = config.cache_config.cache_dtype
    said = {"engine_version": vllm.__version__, "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "routed_experts": bool(getattr(model, "enable_return_routed_experts", False))}
    try:
        formats = engine_formats(lambda f: f(engine.model), config.compilation_config,
                                 FP8 if blocks else dtype,
                                 dtype, "fp8_e4m3" if cache.startswith("fp8") else dtype)
    except BridgeError as e:
        return said | {"formats": None, "formats_problem": str(e)}
    return said | {"formats": dataclasses.asdict(formats)}
