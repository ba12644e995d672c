"""User-defined scorers: a function named by its module or file, or passed in by a Python program."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxfp8rl.errors import ConfigError, nearest

CALLABLE = "callable:"  # prefix of the name of a function that a program passed in
_HANDED_OVER: dict[str, Callable] = {}


@contextlib.contextmanager
def handed_over(functions: Mapping[str, Callable]) -> Iterator[None]:
    """In this context `callable:NAME` is the function under NAME in `functions`."""
    before = dict(_HANDED_OVER)
    _HANDED_OVER.update(functions)
    try:
        yield
    finally:
        _HANDED_OVER.clear()
        _HANDED_OVER.update(before)


def find(name: str, folder: str = "") -> Callable[[Any, str], Any]:
    """The function named by `module:function`, `file.py:function` or `callable:NAME`. Raises ConfigError if
    it does not exist."""
    module, _, function = name.rpartition(":")
    if name.startswith(CALLABLE):
        if function not in _HANDED_OVER:
            raise ConfigError(
                f'task.scorer: "{name}" is a function that a Python program must pass in; this one did not',
                "jaxfp8rl.train(RUN, resume=True, reward=FUNCTION); docs/tasks.md shows it")
        return _HANDED_OVER[function]
    function = find_object(name, folder, "task.scorer")
    check_signature(function, name)
    return function


def find_object(name: str, folder: str, key: str) -> Any:
    """What `module:name` or `file.py:name` stands for. `key`: the setting that names it. Raises ConfigError
    if it does not exist."""
    module, _, attribute = name.rpartition(":")
    found = _module(name, module, folder, key)
    if not hasattr(found, attribute):
        own = [n for n, f in vars(found).items() if inspect.isfunction(f) or inspect.isclass(f)]
        hint = nearest(attribute, own) if own else ": it defines none"
        what = "function" if key == "task.scorer" else "class or function"
        raise ConfigError(f'{key}: module "{module}" has no {what} "{attribute}"{hint}',
                          f"--{key} {module}:{what.split()[0].upper()}")
    return getattr(found, attribute)


def check_signature(function: Any, name: str) -> None:
    """Raise ConfigError unless `function` can be called as function(problem, text)."""
    how = "a scorer is function(problem, text) -> float | None"
    if not callable(function):
        raise ConfigError(f'task.scorer: "{name}" is not a function but {type(function).__name__}', how)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f'task.scorer: "{name}" is async; it would return a coroutine, not a number', how)
    try:
        inspect.signature(function).bind(None, "")
    except TypeError as e:
        raise ConfigError(f'task.scorer: "{name}" cannot be called with (problem, text): {e}', how) from e
    except ValueError:  # a built-in without a signature
        pass


def _module(name: str, module: str, folder: str, key: str) -> ModuleType:
    """Import the module, with its folder on the path. A file beside the config takes precedence over an
    installed module of the same name."""
    file = _file(name, module, folder, key) if module.endswith(".py") else None
    places = [str(file.parent)] if file else [folder] if folder else []
    sys.path[:0] = [p for p in places if p not in sys.path]
    sys.path += [p for p in (os.getcwd(),) if p not in sys.path]
    try:
        return _of_file(file) if file else importlib.import_module(module)
    except ImportError as e:
        searched = ", ".join(filter(None, (folder, "PYTHONPATH", os.getcwd())))
        raise ConfigError(f'{key}: cannot load "{name}": {e} (looked in {searched})',
                          "put the module beside the config file, install it, add its folder to "
                          "PYTHONPATH, or set task.scorer_folder") from e
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise ConfigError(
            f'{key}: cannot load "{name}": {type(e).__name__}: {e} ({at.filename}:{at.lineno})',
            "import it by hand in a fresh Python process") from e


def _file(name: str, path: str, folder: str, key: str) -> Path:
    places = list(dict.fromkeys(p for p in (folder, os.getcwd()) if p))
    found = [file for file in (Path(place, Path(path).expanduser()) for place in places) if file.is_file()]
    if not found:
        raise ConfigError(f'{key}: cannot load "{name}": no file {path} in {" or ".join(places)}',
                          "give its path, absolute or from the config file's folder")
    return found[0].absolute()


def _of_file(file: Path) -> ModuleType:
    """The module in a file, under a unique name, so that numbers.py does not replace Python's numbers."""
    name = f"{file.stem} of {file.parent}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True  # the module gets its __file__
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
