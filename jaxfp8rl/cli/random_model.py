"""`jaxfp8rl random-model`: a Hugging Face folder with random weights of a published shape, so that a preset
can be tried without a download."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxfp8rl.data.random_tokenizer import ENDS, random_tokenizer
from jaxfp8rl.errors import ConfigError, check_writable

if TYPE_CHECKING:  # it loads numpy and more, which the other commands need not wait for
    from jaxfp8rl.models.config import ModelConfig


def add_options(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line; `command` makes its parser."""
    text = "write a Hugging Face folder with random weights of a published shape, to try a preset with"
    parser = command("random-model", _run, text, config=False)
    parser.add_argument("shape", metavar="SHAPE",
                        help="the name of a published model, such as Qwen3-8B, or Qwen3-8B-NVFP4 for random "
                        "codes in four bits")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="the type of the weights; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="the same seed gives the same bytes; default: %(default)s")
    parser.add_argument("--ends", type=int, default=ENDS, metavar="N",
                        help="how many tokens end a completion; default: %(default)s, with which about half "
                        "of the completions of 4,096 tokens end early")


def _run(args: argparse.Namespace, _: list[str]) -> None:
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: it is negative", "give 0 or more")
    check_writable(args.folder)
    print(random_model(args.shape, args.folder, args.dtype, args.seed, args.ends))


def random_model(shape: str, folder: str | Path, dtype: str = "bfloat16", seed: int = 0,
                 ends: int = ENDS) -> str:
    """Write the folder of the published shape named `shape` -> a line that says what was written. Raises
    ModelError for an unknown shape, a folder that is not empty, too little disk, or wrong `ends`."""
    from jaxfp8rl.models.known import shape_named
    from jaxfp8rl.models.packed import check_packable
    from jaxfp8rl.models.random_weights import bytes_of

    began, cfg = time.perf_counter(), dataclasses.replace(shape_named(shape), dtype=dtype)
    if cfg.packed:
        check_packable(cfg)
        if dtype != "bfloat16":
            raise ConfigError(f"--dtype {dtype}: what is not in four bits of {shape} is in bfloat16",
                              "leave --dtype out")
    write_folder(Path(folder), cfg, seed, ends)
    size = f"{bytes_of(cfg) / 1e9:.2f} GB in {cfg.packed.form if cfg.packed else dtype}"
    seconds = f"{time.perf_counter() - began:.1f} s"
    return (f"wrote {folder}: random weights in the shape of {shape}, {size}, "
            f"and a tokenizer with a chat template, in {seconds}")


def write_folder(folder: Path, cfg: ModelConfig, seed: int, ends: int,
                 max_shard_bytes: float = 5e9) -> None:
    """Write config.json, weights, tokenizer and generation_config.json of `cfg`. They appear together."""
    from jaxfp8rl.models.loading import appearing, check_empty, write_json
    from jaxfp8rl.models.random_weights import check_room, write_random_weights

    check_empty(folder)
    check_room(folder, cfg)
    tokenizer = random_tokenizer(cfg.vocab_size, ends)
    with appearing(folder) as partial:
        tokenizer.save(str(partial))
        whole = dataclasses.replace(cfg, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
                                    eos_token_ids=tokenizer.eos_token_ids)
        write_json(partial / "config.json", whole.to_hf())
        write_random_weights(partial, cfg, seed, max_shard_bytes)
