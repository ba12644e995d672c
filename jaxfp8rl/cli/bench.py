"""`jaxfp8rl bench`: run the benchmarks of the repository by name. Their purposes and requirements are read
from their docstrings."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxfp8rl.errors import UserError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
COMMIT = "--commit-result"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark of the repository.

    purpose: the first paragraph of its docstring. needs: the docstring's line "Needs ...", up to the full
    stop; requirements after a semicolon are optional.
    """

    name: str
    purpose: str
    needs: str

    def __str__(self) -> str:
        text = f"{self.name:17} {self.purpose} Needs {self.needs}."
        return textwrap.fill(text, 118, subsequent_indent=" " * 18, break_on_hyphens=False)

    def missing(self) -> str:
        """The first of GPU, vLLM and nvcc that the benchmark needs and this machine lacks, or "". Nothing is
        imported."""
        wanted = self.needs.partition(";")[0]
        if re.search(r"\ba (Hopper )?GPU\b", wanted) and not shutil.which("nvidia-smi"):
            return "NVIDIA GPU"
        if re.search(r"\bvLLM\b", wanted) and not importlib.util.find_spec("vllm"):
            return "vLLM"
        return "nvcc" if re.search(r"\bnvcc\b", wanted) and not shutil.which("nvcc") else ""


def benchmarks() -> dict[str, Benchmark]:
    """The benchmarks by name. Raises UserError if the package was installed without them."""
    if not (FOLDER / "common.py").exists():
        raise UserError(
            f"no benchmarks at {FOLDER}: they are in the repository, not in the installed package",
            "clone the repository and run `pip install -e .` there")
    return {found.name: found for path in sorted(FOLDER.glob("*.py")) if (found := _read(path))}


def _read(path: Path) -> Benchmark | None:
    """The benchmark in a file; None for a file without main()."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        return None
    doc = ast.get_docstring(tree) or ""
    needs = re.search(r"^Needs (.+)\.$", doc, re.MULTILINE)
    return Benchmark(path.stem, " ".join(doc.partition("\n\n")[0].split()),
                     needs[1] if needs else "the requirements in its docstring")


def run_bench(name: str | None, options: Sequence[str]) -> None:
    """Run the benchmark `name` with its own command line, or, without a name, list the benchmarks.

    Its result is written to the working directory; with the option COMMIT it replaces the committed result in
    the repository. Raises UserError for an unknown name and for missing requirements.
    """
    known = benchmarks()
    if name is None:
        return print("\n".join(map(str, known.values())))
    if name not in known:
        raise UserError(f'no benchmark "{name}"{nearest(name, known)}', "`jaxfp8rl bench` lists them")
    if (missing := known[name].missing()) and not {"-h", "--help"} & set(options):
        fit = ", ".join(b.name for b in known.values() if not b.missing())
        raise UserError(f"benchmark {name} needs {known[name].needs}: there is no {missing} here",
                        f"these benchmarks run here: {fit}")
    sys.path.insert(0, str(FOLDER.parent))
    common = importlib.import_module("benchmarks.common")
    if COMMIT not in options:
        vars(common)["RESULTS"] = Path()
    # the benchmark's main() reads sys.argv
    sys.argv = [f"jaxfp8rl bench {name}", *(option for option in options if option != COMMIT)]
    with memory_explained(f"`jaxfp8rl bench {name} --help` lists the options: choose less work by them"):
        importlib.import_module(f"benchmarks.{name}").main()


@contextlib.contextmanager
def memory_explained(next_step: str) -> Iterator[None]:
    """If the device runs out of memory in this context, raise OutOfMemory with what it held. Until then
    nothing is imported: a benchmark that starts processes leaves the device to them."""
    try:
        yield
    except RuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        from jaxfp8rl.memory.fit import explanation

        raise explanation(e, next_step) from e
