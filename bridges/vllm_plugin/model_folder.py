"""A folder from which `vllm serve` starts a model in blockwise FP8, whose weights a learner will publish.

    python -m bridges.vllm_plugin.model_folder Qwen3-8B Qwen3-8B-fp8-to-be-published
    vllm serve Qwen3-8B-fp8-to-be-published --load-format dummy_stacked ...

The folder has the config and the tokenizer of the source, and no weights: the engine refuses to generate
until the first publish.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from bridges.api import BridgeError
from bridges.inside_vllm.build import quantized_config

WEIGHTS = "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf"


def make_folder(source: str | Path, folder: str | Path, *, weights: str = "fp8",
                high_precision_modules: Sequence[str] = ()) -> Path:
    """Copy a model's folder without its weights -> the new folder, which must not exist.

    weights: "fp8" (E4M3, blocks of 128x128, float32 scales) or "as_is". high_precision_modules: linears that
    stay as they are, by their names in vLLM. Raises BridgeError without a config, for a config that already
    names another quantisation, and if the new folder exists.
    """
    source, folder = Path(source), Path(folder)
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise BridgeError(f"{source / 'config.json'} cannot be read: {e}",
                          "name the folder of a model") from e
    if folder.exists():
        raise BridgeError(f"{folder} exists", "choose another folder or remove it first")
    if weights == "fp8" and "quantization_config" in config:
        raise BridgeError(f"{source} is quantised already: "
                          f"{config['quantization_config'].get('quant_method')}",
                          'use weights="as_is", or the folder of the model in BF16')
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*WEIGHTS))
    wanted = quantized_config(config, high_precision_modules) if weights == "fp8" else config
    (folder / "config.json").write_text(json.dumps(wanted, indent=1) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of a model, with config.json")
    parser.add_argument("folder", type=Path, help="the new folder")
    parser.add_argument("--weights", choices=("fp8", "as_is"), default="fp8")
    parser.add_argument("--high-precision", nargs="*", default=[], help="linears that are not quantised")
    args = parser.parse_args()
    try:
        made = make_folder(args.source, args.folder, weights=args.weights,
                           high_precision_modules=args.high_precision)
    except BridgeError as e:
        raise SystemExit(f"error: {e}") from e
    print(f"{made}: vllm serve {made} --load-format dummy_stacked ...")


if __name__ == "__main__":
    main()
