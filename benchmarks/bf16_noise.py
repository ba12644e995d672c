"""How far BF16's own rounding moves log-probabilities: transformers and the learner, each in float32 and in
bfloat16, over the same sampled tokens.

    jaxfp8rl bench bf16_noise [--model models/smollm2-135m] [--completions 4] [--new-tokens 40]

transformers samples answers to sums in float32 at temperature 1; then each computes the log-probabilities of
these tokens. A figure is half the mean square of the differences, in nats: for small ones the KL. No program
in bfloat16 is nearer to another than that unless both round at the same places, in the same order of sums.
The yardstick is the distance of transformers in bfloat16 from itself in float32.

Needs no GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, row, write
from benchmarks.tinker_kl import prompts_of
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.training.step import make_policy

Sequences = list[tuple[int, list[int]]]  # (tokens of the prompt, all tokens)


def sampled(model: Any, prompts: list[list[int]], n: int, new_tokens: int) -> Sequences:
    import torch

    torch.manual_seed(0)
    pad = model.config.vocab_size - 1
    drawn = [(len(p), out.tolist()) for p in prompts
             for out in model.generate(torch.tensor([p]), do_sample=True, temperature=1.0, top_k=0,
                                       max_new_tokens=new_tokens, num_return_sequences=n, pad_token_id=pad)]
    return [(start, tokens[: (tokens + [pad]).index(pad, start)]) for start, tokens in drawn]


def by_transformers(model: Any, sequences: Sequences) -> np.ndarray:
    """Log-probabilities of all sampled tokens, [tokens] float32."""
    import torch

    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0].float().numpy() for _, tokens in sequences]
    return _chosen(logits, sequences)


def by_learner(path: str, dtype: str, sequences: Sequences) -> np.ndarray:
    """The same by the learner's forward pass in `dtype`."""
    model, params = load_params(path, dtype="stored")
    precision = Precision((LayerRun(0, model.num_hidden_layers, frozenset()),), compute_dtype=dtype)
    policy, longest = make_policy(precision)(params), max(len(tokens) for _, tokens in sequences)

    @jax.jit
    def logits(policy: Any, ids: jax.Array) -> jax.Array:
        places, ones = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
        hidden = forward(policy, model, ids, places, ones, precision)[0]
        return (hidden @ head_weight(policy, model).T).astype(jnp.float32)

    padded = lambda tokens: jnp.asarray(tokens + [0] * (longest - len(tokens)), jnp.int32)[None]
    return _chosen([np.asarray(logits(policy, padded(tokens))) for _, tokens in sequences], sequences)


def _chosen(logits: list[np.ndarray], sequences: Sequences) -> np.ndarray:
    found = []
    for of_one, (start, tokens) in zip(logits, sequences, strict=True):
        logp = jax.nn.log_softmax(jnp.asarray(of_one[start - 1 : len(tokens) - 1]))
        found.append(jnp.take_along_axis(logp, jnp.asarray(tokens[start:])[:, None], 1)[:, 0])
    return np.concatenate(found)


def main() -> None:
    parser = arguments(__doc__, "bf16_noise")
    parser.add_argument("--model", default="models/smollm2-135m", help="a folder; default: %(default)s")
    parser.add_argument("--completions", type=int, default=4, help="of each of eight prompts")
    parser.add_argument("--new-tokens", type=int, default=40)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    theirs = {dtype: AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
              for dtype in ("float32", "bfloat16")}
    sequences = sampled(theirs["float32"], prompts_of(args.model), args.completions, args.new_tokens)
    found = {f"transformers, {dtype}": by_transformers(model, sequences) for dtype, model in theirs.items()}
    found |= {f"learner, {dtype}": by_learner(args.model, dtype, sequences) for dtype in theirs}
    apart = lambda a, b: float(np.mean((found[a] - found[b]) ** 2) / 2)
    exact, rounded = "transformers, float32", "transformers, bfloat16"
    pairs = [(rounded, exact), ("learner, float32", exact), ("learner, bfloat16", exact),
             ("learner, bfloat16", rounded)]
    case = f"{Path(args.model).name}, {len(found[exact]):,} tokens"
    rows = [row(case, f"{a} from {b}", "nats", apart(a, b), apart(rounded, exact), f"{rounded} from {exact}",
                smaller_is_better=True) for a, b in pairs]
    write(args.out, "bf16_noise", rows, args.plot)


if __name__ == "__main__":
    main()
