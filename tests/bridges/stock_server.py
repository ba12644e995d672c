"""Stock `vllm serve`, started from its console script with the plugin's wheel, for the tests of publishes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tiny_vllm import CONFIG

from benchmarks.processes import child, free_port
from bridges.served.served_control import Server
from bridges.vllm_plugin.model_folder import make_folder

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token of the tests, 32 letters"
PROMPT = [5, 6, 7, 8, 9]
# A part of each rank of two ends at the edge of an FP8 block.
MODEL = CONFIG | {"num_key_value_heads": 4, "intermediate_size": 512}
ABSENT = "jax", "jaxlib", "jaxfp8rl", "pallas_kernels", "flax", "optax"
START_SECONDS = 400
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_USE_DEEP_GEMM": "0",
    "JAXFP8RL_FP8_KERNEL": "emulated",
}


def wheel(folder: Path) -> Path:
    """Our wheel, built from a copy so that no build folder is left in the checkout."""
    copy = folder / "source"
    for name in ("jaxfp8rl", "pallas_kernels", "bridges", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def installed(folder: Path) -> list[Path]:
    """An environment of vLLM and the wheel alone, as folders for PYTHONPATH: what else is here cannot be
    imported."""
    absent, site = folder / "absent", folder / "site"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ImportError('there is no {name} in an environment "
                                           f"of engines')\n")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site),
               str(wheel(folder))]
    subprocess.run(command, check=True, capture_output=True)
    try:
        version("vllm")
    except PackageNotFoundError:  # the CPU rebuild has another name, but the console script asks for this one
        info = absent / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: "
                                       f"{version('vllm-cpu')}+cpu\n")
    return [absent, site]


def model_folder(folder: Path) -> Path:
    """The model in blockwise FP8 without weights, and a tokenizer of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = folder / "bf16"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(MODEL | {"torch_dtype": "bfloat16"}))
    (source / "model.safetensors").write_bytes(b"weights are not copied")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(MODEL["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}))
    return make_folder(source, folder / "fp8")


@contextlib.contextmanager
def serving(paths: list[Path], model: Path, folder: Path, ranks: int,
            more: tuple[str, ...] = ("--enforce-eager",),
            environment: dict[str, str] | None = None):
    """The address of a server, once it answers."""
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port",
        str(port),
        "--load-format", "dummy_stacked", "--dtype", "bfloat16", "--enable-scale-out",
        "--max-model-len", "512", "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", str(MODEL["vocab_size"]),
        "--served-model-name", "tiny", "--tensor-parallel-size", str(ranks),
        "--weight-transfer-config", '{"backend": "jaxfp8rl"}', "--middleware",
        "bridges.vllm_plugin.guard.Guard", *more]
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "JAX_", "XLA_"))}
    variables = mine | ENVIRONMENT | (environment or {}) | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "JAXFP8RL_TOKEN_FILE": str(folder / "token")}
    with (open(folder / "log", "w") as log,
          child(command, patience=30, cwd=folder, env=variables, stdout=log, stderr=log) as process):
        wait(f"http://127.0.0.1:{port}", process, folder / "log")
        yield f"http://127.0.0.1:{port}"


def greedy(url: str) -> list[int]:
    """The likeliest tokens after PROMPT."""
    params = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    said = Server(url, TOKEN).call("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    return said["choices"][0]["token_ids"]


def wait(url: str, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/health",
                                                          headers={"Authorization": f"Bearer {TOKEN}"}),
                                   timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not start: {log.read_text()[-3000:]}")
