"""The protocol buffers of the `tinker` client, which bring its data here and log-probabilities back. Messages
are the client's own (`tinker.proto`), so that no field is named twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bridges.api import Completion
from jaxfp8rl.errors import nearest
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.serving.losses import knobs_of, loss_named
from jaxfp8rl.serving.refusal import Refused, check_tokens
from jaxfp8rl.serving.rows import Datum
from jaxfp8rl.serving.trainer import Outcome

TARGETS = "target_tokens"
MASKED = ("give 0 where nothing is learned, and there 0 for the weight (cross_entropy) or the advantage "
          "(the other losses)")


class Pass(NamedTuple):
    """A forward pass that a client asks for."""

    loss: str
    data: list[Datum]
    knobs: dict[str, float]


def read_pass(body: bytes) -> Any:
    """The client's ForwardBackwardRequest, not looked into yet. Raises Refused(400) for other bytes."""
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as messages

    request = messages.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as e:
        raise Refused(f"forward_backward: the body is not its protocol buffer: {e}",
                      "use the `tinker` client that docs/tinker.md names") from e
    return request


def turn_of_pass(head: bytes) -> Any:
    """The model_id and the seq_id, as a ForwardBackwardRequest, of the one that begins with `head`; None if
    they are not there. They are its first two fields: without the rest it is a message, too."""
    for end in range(1, len(head) + 1):
        try:
            request = read_pass(head[:end])
        except Refused:
            continue  # the cut is within a field
        if request.model_id and request.seq_id:
            return request
    return None


def checked_pass(request: Any, model: ModelConfig, row_tokens: int) -> Pass:
    """The data of a request, each of up to `row_tokens` tokens. Raises Refused, which names the datum, for
    what this server does not compute."""
    loss, config = request.loss_fn, dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    knobs = knobs_of(loss, config)
    if not request.data:
        raise Refused("forward_backward: no data", "send one datum or more")
    return Pass(loss, [_datum(d, i, loss, model, row_tokens) for i, d in enumerate(request.data)], knobs)


def _datum(message: Any, i: int, loss: str, model: ModelConfig, row_tokens: int) -> Datum:
    where, wanted = f"datum {i}", loss_named(loss).inputs
    chunks = [_tokens(c, where) for c in message.model_input]
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    longest, positions = min(row_tokens, model.max_position_embeddings), model.max_position_embeddings
    if not 0 < len(tokens) <= longest:
        more = (f", or start the server with a larger train.row_tokens (the model has {positions} positions)"
                if row_tokens < positions else f": the model has {positions} positions")
        raise Refused(f"{where}: {len(tokens)} tokens; this server takes 1 to {longest}",
                      f"cut it to {longest}{more}" if len(tokens) else "send one token or more")
    given = {name: _dense(tensor, f"{where}: {name}") for name, tensor in message.loss_fn_inputs.items()}
    known = {TARGETS, *wanted}
    for name in given.keys() - known:
        raise Refused(f"{where}: {loss} has no loss_fn_input {name!r}{nearest(name, known)}", "leave it out")
    for name in sorted(known - given.keys()):
        if name == TARGETS or wanted[name] is None:
            raise Refused(f"{where}: {loss} needs loss_fn_inputs[{name!r}]",
                          f"give {', '.join(sorted(known))}")
    for name, values in given.items():
        if values.shape != tokens.shape:
            raise Refused(f"{where}: {name} has shape {list(values.shape)}, its input has "
                          f"{len(tokens)} tokens",
                          "give one number for each token of model_input (several targets a position: "
                          "not supported)")
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise Refused(f"{where}: {name}[{at}] = {values[at]} is not finite", "look where it comes from")
    targets = given.pop(TARGETS)
    check_tokens(f"{where}: model_input", tokens, model.vocab_size)
    check_tokens(f"{where}: {TARGETS}", targets, model.vocab_size, MASKED)
    inputs = {name: given.get(name, np.float32(default or 0)) for name, default in wanted.items()}
    every = {name: np.broadcast_to(values, tokens.shape).astype(np.float32)
             for name, values in inputs.items()}
    return Datum(tokens, targets.astype(np.int32), every)


def _tokens(chunk: Any, where: str) -> np.ndarray:
    if (kind := chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)) != "encoded_text":
        raise Refused(f"{where}: a chunk of kind {kind!r}: this server's models read text alone",
                      "send EncodedTextChunks")
    return np.frombuffer(chunk.encoded_text.tokens, "<i4")


def _dense(tensor: Any, where: str) -> np.ndarray:
    from tinker.proto import tinker_public_pb2 as messages

    types = {messages.DTYPE_FLOAT32: "<f4", messages.DTYPE_INT64: "<i8", messages.DTYPE_INT32: "<i4"}
    if tensor.HasField("sparse_csr") or tensor.dtype not in types:
        raise Refused(f"{where} is sparse, or of an unknown type", "send a dense float32 or int64 tensor")
    values = np.frombuffer(tensor.dense, types[tensor.dtype])
    try:
        return values.reshape(list(tensor.shape) or [len(values)])
    except ValueError as e:
        raise Refused(f"{where} says shape {list(tensor.shape)} and holds {len(values)} numbers",
                      "send as many numbers as its shape says") from e


def pass_bytes(outcome: Outcome) -> bytes:
    """The answer to a forward pass: `logprobs` of each datum, and the metric `loss:sum`."""
    from tinker.proto import tinker_public_pb2 as messages

    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = outcome.loss
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outcome.logprobs))
    ends = np.cumsum([0, *(4 * len(x) for x in outcome.logprobs)], dtype="<i8")
    record.fields["logprobs"].CopyFrom(messages.BatchedTensor(
        data=b"".join(x.astype("<f4").tobytes() for x in outcome.logprobs), offsets=ends.tobytes(),
        dtype=messages.DTYPE_FLOAT32))
    return answer.SerializeToString()


def sample_bytes(completions: Sequence[Completion], prompt_logprobs: np.ndarray | None) -> bytes:
    """The answer to a sample. prompt_logprobs [prompt] float32, NaN where there is none; None: not asked
    for."""
    from tinker.proto import tinker_public_pb2 as messages

    answer = messages.SampleResponse()
    for c in completions:
        stopped = messages.STOP_REASON_STOP if c.finish_reason == "stop" else messages.STOP_REASON_LENGTH
        answer.sequences.add(stop_reason=stopped, tokens=np.asarray(c.token_ids, "<i4").tobytes(),
                             logprobs=np.asarray(c.logprobs, "<f4").tobytes())
    if prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return answer.SerializeToString()


def failed(error: Refused | Exception) -> Mapping[str, str]:
    """The answer to a request that failed after it was taken, in the shape of RequestFailedResponse."""
    if isinstance(error, Refused):
        return {"error": str(error), "category": "user"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
