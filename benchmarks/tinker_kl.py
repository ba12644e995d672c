"""The KL between sampler and trainer that the unmodified tinker client sees, by precision.

    jaxfp8rl bench tinker_kl [--config smollm2-135m] [--recipes bf16 float32 fp8_unified] [--exclude PATTERN]

Each recipe has a server of its own, `jaxfp8rl serve-training` over vLLM, which trains all parameters. The
client samples 16 completions of each of eight sums, takes the trainer's log-probabilities of the same tokens
while it learns from them by REINFORCE, and goes on. "v1" is the mean of the differences, sampler less
trainer, "v2" half the mean of their squares: the two estimates of tinker-cookbook
(`rl/metrics.py`, `kl_sample_train_v1` and `_v2`). A figure is that of the worst step. BF16's yardstick is
2e-4, that of others is BF16 in the same run. "float32" is the recipe bf16 with both types of it float32.
--exclude is the FP8 recipes' `precision.exclude`: of SmolLM2 only down_proj can be FP8. Other words are
settings of the config, as --KEY VALUE for `train`.

Needs a GPU and vLLM; the tinker client beside them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.processes import child, free_port
from jaxfp8rl.config.toml import load_config

BOUND, SAMPLES, RATE = 2e-4, 16, 1e-5
SUMS = [(17, 25), (8, 64), (31, 12), (5, 90), (44, 23), (76, 9), (52, 38), (19, 61)]
FLOAT32 = ["bf16", "--precision.compute_dtype", "float32", "--precision.weight_dtype", "float32"]
BASE, KEY = "tinker://base/weights/all-parameters", "tml-any"


@contextlib.contextmanager
def server(config: str, settings: list[str], seconds: float, log: Path) -> Iterator[str]:
    """The URL of a server that is up. Raises RuntimeError, with the end of its console, if it is not in
    time."""
    port, end = free_port(), time.monotonic() + seconds
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as console:
        command = [sys.executable, "-m", "jaxfp8rl", "serve-training", config, "--weights", folder,
                   "--name", "model", "--port", str(port), *settings]
        with child(command, patience=20, stdout=console, stderr=subprocess.STDOUT) as process:
            while not _is_up(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"no server in {seconds:.0f} s; the end of {log}:\n"
                                       f"{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield url


def _is_up(url: str) -> bool:
    try:
        asked = urllib.request.Request(f"{url}/api/v1/healthz", headers={"X-API-Key": KEY})
        with urllib.request.urlopen(asked, timeout=5):
            return True
    except urllib.error.HTTPError:
        raise
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def prompts_of(path: str) -> list[list[int]]:
    """The tokens of the sums, by the chat template where the tokenizer has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = [f"What is {a} + {b}? Answer with the number only." for a, b in SUMS]
    if not tokenizer.chat_template:
        return [tokenizer.encode(text) for text in asked]
    said = [[{"role": "user", "content": text}] for text in asked]
    return [tokenizer.encode(tokenizer.apply_chat_template(s, tokenize=False, add_generation_prompt=True),
                             add_special_tokens=False) for s in said]


def differences(url: str, prompts: list[list[int]], steps: int, max_tokens: int) -> list[np.ndarray]:
    """Sampler's less trainer's log-probability of every sampled token, an array a step. The reward of a
    completion is the share of its tokens that are its first one: any reward serves here."""
    import tinker
    from tinker import types

    found, service = [], tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = service.create_training_client_from_state(BASE).result(600)
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result(600)
        asked = [sampler.sample(types.ModelInput.from_ints(p), SAMPLES,
                                types.SamplingParams(max_tokens=max_tokens, seed=1000 * step + i))
                 for i, p in enumerate(prompts)]
        drawn = [(p, s) for p, a in zip(prompts, asked) for s in a.result(600).sequences]
        rewards = np.array([np.mean([t == s.tokens[0] for t in s.tokens]) for _, s in drawn])
        data = [_datum(p, s, r - rewards.mean()) for (p, s), r in zip(drawn, rewards)]
        passed = trainer.forward_backward(data, "importance_sampling")
        applied = trainer.optim_step(types.AdamParams(learning_rate=RATE))
        outs = passed.result(600).loss_fn_outputs
        applied.result(600)
        found.append(np.concatenate([np.asarray(s.logprobs) - out["logprobs"].to_numpy()[len(p) - 1 :]
                                     for (p, s), out in zip(drawn, outs)]))
    service.close("success").result(60)
    return found


def _datum(prompt: list[int], s, advantage: float):
    from tinker import types

    before, whole = [0.0] * (len(prompt) - 1), [*prompt, *s.tokens]
    inputs = {"logprobs": [*before, *s.logprobs], "advantages": [*before, *[advantage] * len(s.tokens)]}
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={
        "target_tokens": [0] * len(before) + list(s.tokens),
        **{k: np.asarray(v, np.float32) for k, v in inputs.items()}})


def main() -> None:
    parser = arguments(__doc__, "tinker_kl")
    parser.add_argument("--config", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "float32", "fp8_unified"],
                        help="default: %(default)s")
    parser.add_argument("--exclude", default="self_attn|gate_proj|up_proj", metavar="PATTERN",
                        help="linears of the FP8 recipes in BF16; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300, help="for a server's start: %(default)s")
    parser.add_argument("--logs", type=Path, default=Path("runs/tinker_kl"), metavar="FOLDER")
    args, settings = parser.parse_known_args()
    path = load_config(args.config, settings).model.path
    args.logs.mkdir(parents=True, exist_ok=True)
    rows, tokens, bf16 = [], {}, {}
    for recipe in args.recipes:
        log = args.logs / f"{recipe}.log"
        how = FLOAT32 if recipe == "float32" else [recipe]
        if recipe.startswith("fp8") and args.exclude:
            how = [recipe, "--precision.exclude", args.exclude, "--correction.preset", "token_tis"]
        with server(args.config, [*settings, "--precision.recipe", *how], args.seconds, log) as url:
            steps = differences(url, prompts_of(path), args.steps, args.new_tokens)
        figures = {"v1": max(abs(d.mean()) for d in steps), "v2": max((d**2).mean() / 2 for d in steps)}
        tokens[recipe] = sum(map(len, steps))
        for name, figure in figures.items():
            yardstick = (bf16[name], "BF16") if recipe != "bf16" and bf16 else (BOUND, "the bound of BF16")
            metric = f"KL, {name}, the worst of {len(steps)} steps"
            rows.append(row(f"{args.config}, {recipe}", metric, "nats", float(figure), *yardstick,
                            smaller_is_better=True))
        if recipe == "bf16":
            bf16 = {k: float(v) for k, v in figures.items()}
        write(args.out, "tinker_kl", rows, args.plot, tokens=tokens)


if __name__ == "__main__":
    main()
