"""A PyTorch learner drives vLLM: REINFORCE with a truncated importance weight.

`TreeSource` reads the module's own parameters; the engine checks every name and shape before a byte moves.
"""

import importlib.util
import sys

if not importlib.util.find_spec("vllm"):
    sys.exit("skipped: vLLM is not installed (pip install vllm)")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bridges import GenRequest, SamplingParams, TreeSource, VllmEngine, VllmReload

SIZES = dict(vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True)
PROMPTS = [(1, 2, 3), (4, 5), (6,), (8, 9, 10, 11)]


def reward(tokens):
    """The share of even tokens."""
    return float((tokens % 2 == 0).mean())


def logprobs(model, prompt, completion):
    """[len(completion)]: of each token given those before it."""
    ids = torch.tensor([[*prompt, *completion]])
    logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0]


def step(model, optimizer, groups):
    loss = 0.0
    for prompt, group in zip(PROMPTS, groups):
        baseline = sum(reward(c.token_ids) for c in group) / len(group)
        for c in group:
            logp = logprobs(model, prompt, c.token_ids)
            weight = (logp.detach() - torch.from_numpy(c.logprobs)).exp().clamp(max=2.0)
            loss = loss - (weight * (reward(c.token_ids) - baseline) * logp).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()
optimizer, sampling = torch.optim.Adam(model.parameters(), 5e-3), SamplingParams(max_tokens=8)
config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
engine = VllmEngine(config, weights="float32", max_model_len=64, max_num_seqs=32, enforce_eager=True)
(transport := VllmReload()).open(engine)
for version in range(6):
    transport.publish(TreeSource(model), version)  # the module's names are Hugging Face's
    requests = [GenRequest(str(i), p, sampling, n=8, seed=version) for i, p in enumerate(PROMPTS)]
    groups = engine.generate(requests)
    mean = sum(reward(c.token_ids) for group in groups for c in group) / (8 * len(PROMPTS))
    print(f"version {version}: reward {mean:.3f}", flush=True)
    step(model, optimizer, groups)
engine.close()
