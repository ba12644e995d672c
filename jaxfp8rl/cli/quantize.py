"""`jaxfp8rl quantize`: a Hugging Face folder in four bits, as a base for low-rank adapters (docs/lora.md)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from jaxfp8rl.models.packed_config import FORMS


def add_options(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line; `command` makes its parser."""
    text = "write a Hugging Face folder in four bits, which vLLM loads and adapters train over"
    parser = command("quantize", _run, text, config=False)
    parser.add_argument("source", metavar="FOLDER", help="a Hugging Face folder in BF16, FP16 or FP32")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--format", choices=FORMS, default="nvfp4",
                        help="of compressed-tensors, weights alone; default: %(default)s")


def _run(args: argparse.Namespace, _: list[str]) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it needs no GPU, and a run may use it
    from jaxfp8rl.checkpoint.export import quantize_folder

    print(f"wrote {quantize_folder(args.source, args.out, args.format)}")
