"""The walls of the house, read from the source: who may import whom, and what must never stand in the code.

    pallas_kernels -> nothing of ours    bridges -> bridges
    jaxfp8rl -> pallas_kernels, bridges.api, bridges.proof.manifest

Three files of `jaxfp8rl/rollout` know concrete engines and transports: `engines.py` chooses and builds them,
the embedded one of the functions of `embedded.py`, the served ones by `served.py`. `gpu_memory.py` beside
them asks the driver. `jaxfp8rl/cli/main.py` loads the GGUF importer when it is asked for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.processes import printed

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxfp8rl", "pallas_kernels", "bridges")
FILES = sorted(p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
ALLOWED = {
    "pallas_kernels": r"pallas_kernels(\..*)?",
    "bridges": r"bridges(\..*)?",
    "jaxfp8rl": r"jaxfp8rl(\..*)?|pallas_kernels(\..*)?|bridges\.(api|proof\.manifest)(\..*)?",
}
EXTRA = {
    "jaxfp8rl/rollout/engines.py": r"bridges\.(engines|transports|served|inside_vllm)\..*",
    "jaxfp8rl/rollout/embedded.py": r"bridges\.engines\..*",
    "jaxfp8rl/rollout/served.py": r"bridges\.served\..*",
    "jaxfp8rl/rollout/gpu_memory.py": r"bridges\.inside_vllm\.device_pool\..*",
    "jaxfp8rl/cli/main.py": r"bridges\.sources\.gguf_import\..*",
}
LAZY = {"torch", "vllm", "transformers"}  # imported inside functions alone


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(dotted name, line) of everything imported anywhere; `from a import b` gives a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write imports in full"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def breaches(file: str, source: str) -> list[str]:
    """Imports of `file` that its package may not make."""
    package = file.split("/")[0]
    allowed = "|".join(filter(None, (ALLOWED[package], EXTRA.get(file))))
    ours = [(name, line) for name, line in imports(ast.parse(source)) if name.split(".")[0] in PACKAGES]
    return [f"{file}:{line} imports {name}" for name, line in ours if not re.fullmatch(allowed, name)]


def units() -> dict[str, set[str]]:
    """Of each row of the table in docs/architecture.md, in order: the folders and files that it may
    import."""
    table = (ROOT / "docs/architecture.md").read_text().partition("## Folders")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\| ([^|]+) \|$", table, re.M)
    whole = lambda unit, name: name if "/" in name or name in PACKAGES else f"{unit.split('/')[0]}/{name}"
    names = {unit: [] if words == "nothing of ours" else words.split(", ") for unit, words in rows}
    return {unit: {whole(unit, name) for name in found} for unit, found in names.items()}


def unit_of(file: str) -> str:
    """The row that a file belongs to."""
    return "pallas_kernels" if file.startswith("pallas_kernels") else "/".join(file.split("/")[:2])


def module_graph() -> dict[str, set[str]]:
    """By file: the files of ours that it imports anywhere, for types and in functions, too."""
    files = {f[:-3].replace("/", ".").removesuffix(".__init__"): f for f in FILES}

    def home(name: str) -> str | None:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return files.get(name)

    found = {f: {home(name) for name, _ in imports(ast.parse((ROOT / f).read_text()))} for f in FILES}
    return {f: targets - {None, f} for f, targets in found.items()}


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Files that import each other, each circle sorted."""
    reach = {f: set(targets) for f, targets in graph.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    return sorted({tuple(sorted(g for g in reach if f in reach[g] and g in reach[f])) for f in reach
                   if f in reach[f]})


def test_folders_import_what_the_table_says():
    table, graph = units(), module_graph()
    lonely = {"jaxfp8rl/__init__.py", "jaxfp8rl/__main__.py", "bridges/__init__.py"}  # the doors
    assert {unit_of(f) for f in FILES} - lonely - {"pallas_kernels"} == set(table)
    found = {(unit_of(f), unit_of(g)) for f, targets in graph.items() for g in targets if f not in lonely}
    assert {(a, b) for a, b in found if a != b and a != "pallas_kernels"} == {
        (unit, name) for unit, names in table.items() for name in names}


def test_a_folder_stands_below_all_that_it_imports():
    table, seen = units(), {"pallas_kernels"}
    for unit, names in table.items():
        assert names <= seen, unit
        seen.add(unit)


def test_no_two_modules_import_each_other():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [("b", "c")]
    assert circles(module_graph()) == []


def at_module_level(tree: ast.Module) -> list[str]:
    """Top packages imported when the module is, TYPE_CHECKING blocks left out."""
    names, todo = [], list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [name.split(".")[0] for name, _ in imports(node)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [child for child in ast.iter_child_nodes(node)
                     if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_keep_to_the_walls(package):
    found = [line for f in FILES if f.startswith(package + "/")
             for line in breaches(f, (ROOT / f).read_text())]
    assert found == []


@pytest.mark.parametrize(
    "file, source",
    [
        ("pallas_kernels/x.py", "import jaxfp8rl.config.schema"),
        ("pallas_kernels/x.py", "def f():\n from bridges import api"),
        ("bridges/x.py", "from pallas_kernels.quantize import reference"),
        ("jaxfp8rl/x.py", "from bridges.engines.embedded_engine import EmbeddedEngine"),
        ("jaxfp8rl/x.py", "from bridges import engines"),
        ("jaxfp8rl/x.py", "import bridges"),
        ("jaxfp8rl/cli/main.py", "from bridges.sources.dlpack import torch_view"),
    ],
)
def test_a_breach_is_seen(file, source):
    assert breaches(file, source)


def test_heavy_packages_are_imported_in_functions():
    heavy = {f: sorted(LAZY & set(at_module_level(ast.parse((ROOT / f).read_text())))) for f in FILES}
    assert {f: names for f, names in heavy.items() if names} == {}
    assert at_module_level(ast.parse("try:\n import torch\nexcept ImportError:\n import vllm")) == [
        "vllm", "torch"]


FORBIDDEN = {
    "pickle": r"\bimport (cloud)?pickle\b|\bfrom (cloud)?pickle\b|allow_pickle\s*=\s*True",
    "torch.load": r"\btorch\.load\(",
    "eval(": r"(?<![.\w])eval\(",
    "exec(": r"(?<![.\w])exec\(",
    "remote code": r"trust_remote_code[\"']?\s*[=:]\s*True",
    "insecure serialisation": r"VLLM_ALLOW_INSECURE_SERIALIZATION",
    "shell": r"shell\s*=\s*True|os\.system\(",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_unsafe_stands_in_the_code(what):
    hits = [
        f"{f}:{n}"
        for f in FILES
        for n, line in enumerate((ROOT / f).read_text().splitlines(), 1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert hits == []


@pytest.mark.parametrize(
    "modules, unwanted",
    [
        ("bridges.api, bridges.proof.manifest", {"jax", "torch", "vllm"}),
        ("jaxfp8rl.config.toml, jaxfp8rl.cli.main", {"jax", "torch", "vllm"}),
        ("jaxfp8rl.cli.settings", {"jax", "numpy"}),  # the documentation's environment has neither
        ("jaxfp8rl.rollout.engines, jaxfp8rl.training.loop", {"torch", "vllm", "transformers"}),
        ("bridges.engines.vllm_engine", {"torch", "vllm", "transformers"}),
    ],
)
def test_importing_stays_light(modules, unwanted):
    code = f"import sys, {modules}; print(*({unwanted!r} & set(sys.modules)))"
    assert printed(code).split() == []


def test_every_refusal_names_the_next_step():
    """ProcessFailed and what is handed on repeat another error, which has its own."""
    kinds = {"UserError", "ConfigError", "DataError", "ModelError", "CheckpointError", "GateFailed", "Rule",
             "NonFiniteStep", "OutOfMemory", "BridgeError"}
    without = []
    for file in FILES:
        calls = [node for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds]
        for call in calls:
            repeats = ast.unparse(call.args[0]) == "str(e)" if call.args else False
            words = len(call.args) + any(k.arg == "next_step" for k in call.keywords)
            if words < (3 if call.func.id == "Rule" else 2) and not repeats:
                without.append(f"{file}:{call.lineno}")
    assert without == []
