"""The seam between a learner and a rollout engine: contracts, engines, sources of weights, and their proof.

    import bridges

    engine, transport = bridges.VllmEngine(hf_config, max_model_len=1024), bridges.VllmReload()
    transport.open(engine)
    transport.publish(bridges.TreeSource(params, mapping), version=1)
    request = bridges.GenRequest("a", (1, 2, 3), bridges.SamplingParams(max_tokens=8), n=4)
    [completions] = engine.generate([request])

Named tensors go into an engine; tokens and log-probabilities come out. A learner of any kind implements
`WeightSource`, or describes its parameters to `TreeSource`. An engine of any kind implements `RolloutEngine`,
and `check_engine` tests it against the contract. A name is loaded at its first use: `import bridges` needs no
package, and the contracts, `TreeSource` and `check_engine` need only numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridges.api import (
        BridgeError,
        Capabilities,
        Completion,
        EngineDirty,
        EngineFormats,
        EngineUnhealthy,
        GenRequest,
        Health,
        ManifestMismatch,
        ParamMeta,
        PublishFailed,
        PublishReceipt,
        RolloutEngine,
        SamplingParams,
        StackRow,
        VersionSpan,
        WeightSource,
        WeightTransport,
    )
    from bridges.conformance import ConformanceFailed, check_engine
    from bridges.engines.embedded_engine import EmbeddedEngine
    from bridges.engines.vllm_engine import VllmEngine
    from bridges.inside_vllm.adapters import AdapterSlots
    from bridges.sources.array_source import ArraySource
    from bridges.sources.tree_source import To, TreeSource
    from bridges.transports.embedded import EmbeddedTransport
    from bridges.transports.vllm_inplace import VllmInplace
    from bridges.transports.vllm_reload import VllmReload
    from bridges.transports.vllm_slots import VllmSlots

__all__ = [
    "AdapterSlots", "ArraySource", "BridgeError", "Capabilities", "Completion", "ConformanceFailed",
    "EmbeddedEngine",
    "EmbeddedTransport", "EngineDirty", "EngineFormats", "EngineUnhealthy", "GenRequest",
    "Health", "ManifestMismatch", "ParamMeta", "PublishFailed", "PublishReceipt", "RolloutEngine",
    "SamplingParams", "StackRow", "To", "TreeSource", "VersionSpan", "VllmEngine", "VllmInplace",
    "VllmReload", "VllmSlots",
    "WeightSource",
    "WeightTransport", "check_engine",
]
# name -> its module and its name there; every other name of __all__ is in bridges.api
_HOMES = {
    "AdapterSlots": "bridges.inside_vllm.adapters:AdapterSlots",
    "ArraySource": "bridges.sources.array_source:ArraySource",
    "ConformanceFailed": "bridges.conformance:ConformanceFailed",
    "EmbeddedEngine": "bridges.engines.embedded_engine:EmbeddedEngine",
    "EmbeddedTransport": "bridges.transports.embedded:EmbeddedTransport",
    "To": "bridges.sources.tree_source:To",
    "TreeSource": "bridges.sources.tree_source:TreeSource",
    "VllmEngine": "bridges.engines.vllm_engine:VllmEngine",
    "VllmInplace": "bridges.transports.vllm_inplace:VllmInplace",
    "VllmReload": "bridges.transports.vllm_reload:VllmReload",
    "VllmSlots": "bridges.transports.vllm_slots:VllmSlots",
    "check_engine": "bridges.conformance:check_engine",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bridges' has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, f"bridges.api:{name}").partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
