"""Programs that are compiled before a run calls them, and lowered once.

JAX lowers a program in Python, under Python's lock: an update of an 8B model took 22 s of a core, most of it
for the kernels, and an engine that starts in another thread has to share the lock. The lowered
programs of a run are therefore kept beside the compiled ones, and on a GPU a process of its own lowers those
that are not there yet. XLA compiles in threads, without the lock.

Where threads lower at the same time, kernels that their programs share come out with other bytes each time,
and their compiled programs are not found again. So programs are lowered one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax import export

from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.optim.low_bit import Scaled
from jaxfp8rl.precision.four_bits import FourBits
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.types import TrainBatch, TrainState

PATIENCE = 60.0  # seconds that the end of a process waits for a compiler
KEPT_FILES = 256  # lowered programs in a folder, a few MB each: the oldest give way
LAST = "score"  # the program that is lowered last
CHILD = (sys.executable, "-P", "-W", "ignore", "-m", "jaxfp8rl.training.ahead_child")
# custom calls of kernels: JAX does not promise their form to another release, and no other reads these files
UNPROMISED = tuple(map(export.DisabledSafetyCheck.custom_call, ("mosaic_gpu_v2", "LayoutConstraint")))
for record in (TrainState, TrainBatch, Scaled, QuantizedWeight, FourBits, optax.ScaleByAdamState):
    export.register_namedtuple_serialization(record, serialized_name=f"jaxfp8rl.{record.__name__}")


class Ahead:
    """A jitted function that is lowered and compiled before it is called.

    `jitted`: as `jit(function, **options)` made it. `shapes`: the arguments that it will get, as
    jax.ShapeDtypeStructs. A call waits for the thread that compiles. With other arguments than `shapes`, or
    if that thread failed, `jitted` computes, and raises what is wrong.
    """

    def __init__(self, jitted: Any, jit: Callable, shapes: tuple, **options: Any):
        self.jitted, self.shapes, self.name = jitted, shapes, jitted.__name__
        self._jit = functools.partial(jit, **options)
        self._lowered: export.Exported | None = None
        self._known: Any = None  # `jitted` as it was lowered before
        self._ready = threading.Event()

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._ready.wait()
        return (self._known if self._fits(args, named) else self.jitted)(*args, **named)

    def exported(self) -> bytes:
        """The lowered program, as `lower` takes it. Raises ValueError for one that JAX cannot write."""
        return bytes(export.export(self.jitted, disabled_checks=UNPROMISED)(*self.shapes).serialize())

    def lower(self, written: bytes | None = None) -> jax.stages.Lowered:
        """The lowered program: calls will use that of `written`, from `exported`, or, for None, `jitted`."""
        if written is None:
            return self.jitted.lower(*self.shapes)
        lowered = export.deserialize(bytearray(written))
        call = lambda *args: lowered.call(*args)
        call.__name__ = self.name
        self._lowered, self._known = lowered, self._jit(call)
        return self._known.lower(*self.shapes)

    def finish(self) -> None:
        """Let calls begin."""
        self._ready.set()

    def _fits(self, args: tuple, named: dict[str, Any]) -> bool:
        if (lowered := self._lowered) is None or named:
            return False
        leaves, tree = jax.tree.flatten((args, {}))
        like = lambda x, aval: getattr(x, "shape", None) == aval.shape and x.dtype == aval.dtype
        return tree == lowered.in_tree and all(map(like, leaves, lowered.in_avals))


class KeptLowered:
    """The lowered programs of a run in `folder`. A process of its own lowers those that are not there.

    Anyone who can write to the folder can make this process run their code.
    """

    def __init__(self, folder: Path, cfg: Config, model: ModelConfig):
        self._folder, self._cfg, self._key, self._ended = folder, cfg, key_of(cfg, model), False
        self._child = None if place(folder, self._key, LAST).exists() else self._lower()

    @classmethod
    def of(cls, compiled: str, cfg: Config, model: ModelConfig, layout: MeshLayout) -> KeptLowered | None:
        """Those beside the programs in the folder `compiled`. None if no programs are kept, or on another
        machine, or if the learner runs on several devices: this process lowers then."""
        here = compiled and "://" not in compiled and jax.config.jax_enable_compilation_cache
        return cls(Path(compiled, "lowered"), cfg, model) if here and not layout.mesh else None

    def read(self, name: str) -> bytes | None:
        """The program of that name, once it is there; None if it could not be lowered, with a warning."""
        path = place(self._folder, self._key, name)
        if not path.exists():
            child = self._child = self._child or self._lower()  # others are there, this one was cleared away
            while not path.exists() and child.poll() is None:
                time.sleep(0.1)
        if path.exists():
            return path.read_bytes()
        if self._ended:
            return None
        warnings.warn(f"{name}: the process that lowers programs failed, and this one lowers it, while the "
                      f"engine waits: {self._said()}", stacklevel=2)
        return None

    def end(self) -> None:
        """Lower nothing more."""
        self._ended = True
        if self._child:
            self._child.kill()

    def _said(self) -> str:
        """The last line that the process wrote to standard error."""
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]

    def _lower(self) -> subprocess.Popen[str]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads could fill up
        # it shares the GPU, of which JAX would take most for the first constant of a program
        alone = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        child = subprocess.Popen([*CHILD, str(self._folder), self._key], stdin=subprocess.PIPE,
                                 stdout=subprocess.DEVNULL, stderr=self._errors, text=True, env=alone)
        atexit.register(child.kill)
        assert child.stdin
        with contextlib.suppress(BrokenPipeError):  # `read` says what ended it
            child.stdin.write(self._cfg.model_dump_json())
            child.stdin.close()
        return child


def place(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}-{name}"


def write(folder: Path, key: str, program: Ahead) -> None:
    """Lower a program, and keep it in `folder` under `key`; of many programs the oldest go."""
    draft = place(folder, key, f"{program.name}.{os.getpid()}")
    draft.write_bytes(program.exported())
    os.replace(draft, place(folder, key, program.name))
    with contextlib.suppress(FileNotFoundError):  # another run clears it, too
        by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in by_age[:-KEPT_FILES]:
            path.unlink()


def key_of(cfg: Config, model: ModelConfig) -> str:
    """What the lowered programs of a run depend on: this code, JAX and the engine's release, the device, and
    the config without its section `run`."""
    device = jax.local_devices()[0]
    facts = [code(), *map(version, ("jax", "jaxlib", "vllm")), device.device_kind,
             getattr(device, "core_count", 0), jax.config.jax_enable_x64, cfg.updates, model.to_hf(),
             cfg.model_dump(mode="json", exclude={"run"})]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def code() -> str:
    """A hash of the source from which programs are made."""
    found = hashlib.sha256()
    for package in ("jaxfp8rl", "pallas_kernels", "bridges"):
        for path in sorted((Path(__file__).parents[2] / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def compile_ahead(programs: Sequence[Ahead], kept: KeptLowered | None = None) -> threading.Thread:
    """Lower each program after the other in a thread, which is returned, and compile each in its own.

    A program that does not compile raises its error again where the run calls it. The process waits for a
    compiler at its end, because XLA does not survive being ended in the middle; it begins no other.
    """
    ending = threading.Event()
    thread = threading.Thread(target=_lower_all, args=(programs, kept, ending), name="lowering", daemon=True)
    thread.start()
    atexit.register(_end, thread, kept, ending)
    return thread


def _end(thread: threading.Thread, kept: KeptLowered | None, ending: threading.Event) -> None:
    ending.set()
    if kept:
        kept.end()
    thread.join(PATIENCE)


def _lower_all(programs: Sequence[Ahead], kept: KeptLowered | None, ending: threading.Event) -> None:
    compilers = []
    for program in programs:
        try:
            written = kept.read(program.name) if kept and not ending.is_set() else None
            if ending.is_set():
                program.finish()
                continue
            lowered = program.lower(written)
        except Exception as e:  # noqa: BLE001 - the run's own call raises it, with its phase
            warnings.warn(f"{program.name} is not compiled ahead: {type(e).__name__}: {e}", stacklevel=2)
            program.finish()
            continue
        compiler = threading.Thread(target=_compile, args=(program, lowered), name="compiler", daemon=True)
        compiler.start()
        compilers.append(compiler)
    for compiler in compilers:
        compiler.join()


def _compile(program: Ahead, lowered: jax.stages.Lowered) -> None:
    try:
        lowered.compile()
    except Exception:  # noqa: BLE001 - the run's own call raises it, with its phase
        return
    finally:
        program.finish()
