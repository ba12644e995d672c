"""Choose the transport into a vLLM engine of this process: in place, or by vLLM's own reload; and adapters
into their slots. Weights in four bits have one way."""

from __future__ import annotations

from bridges.api import BridgeError, RolloutEngine, WeightTransport

WAYS = ("auto", "in_place", "reload")


def open_vllm_transport(how: str, engine: RolloutEngine) -> WeightTransport:
    """Open a transport on `engine`, a VllmSlots over it if the engine has slots. "auto" takes "in_place",
    which verifies every publish, if the engine allows it, else "reload", and prints its choice with the
    reason. An engine in four bits has VllmPacked, which is "in_place" for all other weights.

    Raises BridgeError if the engine does not allow the requested transport.
    """
    if how not in WAYS:
        raise BridgeError(f"no transport {how!r} into vLLM", f"choose {', '.join(WAYS)}")
    packed = bool(getattr(engine, "linears", ()))
    if packed and how != "reload":
        from bridges.transports.vllm_packed import VllmPacked as Transport
    elif how == "reload":
        from bridges.transports.vllm_reload import VllmReload as Transport  # does not need JAX
    else:
        from bridges.transports.vllm_inplace import VllmInplace as Transport
    transport: WeightTransport = Transport()
    if getattr(engine, "slots", None) is not None:
        from bridges.transports.vllm_slots import VllmSlots

        transport = VllmSlots(transport)
    try:
        transport.open(engine)
    except BridgeError as e:
        if how != "auto" or packed:
            raise
        print(f'rollout.publish = "auto" takes "reload": {str(e).splitlines()[0]}')
        return open_vllm_transport("reload", engine)
    if how == "auto":
        print('rollout.publish = "auto" takes "in_place": vLLM keeps every tensor in a layout known here'
              + (", and has read those in four bits" if packed else ""))
    return transport
