"""TOML files and command-line overrides -> `Config`, and back.

A refusal names the file, the line, the key, the problem and the nearest right thing, and all problems of a
file are listed at once (`jaxfp8rl.config.problems`).
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
import os
import re
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxfp8rl.config.engine_choice import with_engine
from jaxfp8rl.config.overrides import Override, apply, parse_overrides
from jaxfp8rl.config.problems import Places, invalid, placed
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.sampling import Run
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.section import Section
from jaxfp8rl.errors import ConfigError, near_path, nearest

RESOLVED = f"# {Run.headline()}\n[run]\n"  # the first lines that `dump_config` writes


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or a shipped preset by its bare name ("demo"), apply overrides and check everything.

    overrides: command-line words, `["--optim.lr", "1e-6", "--run.dir=runs/a"]`. Raises ConfigError.
    """
    name, text = _read(path := os.path.expanduser(path))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(_syntax_problem(name, text, e), "repair that line") from e
    given = parse_overrides(overrides)
    if text.startswith(RESOLVED):
        _as_it_was_meant(data)
    for override in given:
        apply(override, data)
    where = Places(name, text, given)
    try:
        cfg = _beside(Config.model_validate(data), Path(path), text)
        return check(with_engine(cfg if Path(path).is_file() else _fitted(cfg, given)))
    except pydantic.ValidationError as e:
        raise invalid(name, e, where.named) from e
    except ConfigError as e:
        raise placed(e, where) from e


def _as_it_was_meant(data: dict[str, Any]) -> None:
    """Fill in what a resolved config of an older version meant by a key that it does not have."""
    run, task, optim = (data.get(name) for name in ("run", "task", "optim"))
    if not (isinstance(run, dict) and isinstance(task, dict) and isinstance(optim, dict)):
        return  # the schema refuses it
    options = task.get("options", {})
    if not isinstance(options, dict):
        return  # and this
    if "seed" not in task:  # the run's seed drew the problems
        task["seed"] = options.pop("seed", run.get("seed", 0))
    if optim.get("schedule", "constant") != "constant":  # every decay ended at 0
        optim.setdefault("min_lr_ratio", 0.0)


def _fitted(cfg: Config, given: Sequence[Override]) -> Config:
    """A preset whose warm-up of the learning rate ends before the run does, or the warm start.

    A run that `given` makes shorter than the preset's warm-up gets a shorter warm-up, and a line says so. A
    warm-up that is itself given is refused instead, by a rule.
    """
    for section, end in (("optim", cfg.updates), ("sft", cfg.sft.steps)):
        part = getattr(cfg, section)
        if 0 < end <= part.warmup_steps and (section, "warmup_steps") not in {o.path for o in given}:
            print(f"{section}.warmup_steps: the preset's {part.warmup_steps} are cut to {end - 1}, of {end} "
                  "updates in all", file=sys.stderr)
            cfg = cfg.model_copy(update={section: part.model_copy(update={"warmup_steps": end - 1})})
    return cfg


def of_table(data: Mapping[str, Any]) -> Config:
    """The config that a table of sections describes. Raises ConfigError."""
    try:
        return check(with_engine(Config.model_validate(dict(data))))
    except pydantic.ValidationError as e:
        raise invalid("config", e, ".".join) from e


def _beside(cfg: Config, file: Path, text: str) -> Config:
    """The config with the folder of its file as `task.scorer_folder`, if it has a scorer, an environment or a
    tool of its own and names no folder. A resolved config names the folder."""
    wants_folder = (cfg.task.has_own_scorer
                    or cfg.environment.has_own_tool) and not cfg.task.scorer_folder and file.is_file()
    if not wants_folder or text.startswith(RESOLVED):
        return cfg
    return cfg.model_copy(
        update={"task": cfg.task.model_copy(update={"scorer_folder": str(file.absolute().parent)})})


def dump_config(cfg: Config) -> str:
    """The resolved config as TOML: every field, with its description as a comment. It loads back to an equal
    Config."""
    return "\n".join(line for name in Config.model_fields for line in _dump_section(name, getattr(cfg, name)))


# --- presets


def presets() -> dict[str, Traversable]:
    """The shipped configs by name: `configs/` beside the package in a checkout, `jaxfp8rl/_presets` in a
    wheel."""
    package = importlib.resources.files("jaxfp8rl")
    shipped = package / "_presets"
    folder = shipped if shipped.is_dir() else Path(str(package)).parent / "configs"
    files = folder.iterdir() if folder.is_dir() else ()
    return {f.name.removesuffix(".toml"): f for f in files if f.name.endswith(".toml")}


def _read(path: str) -> tuple[str, str]:
    """(name for messages, text) of a file, or of a preset named by its bare name."""
    file = Path(path)
    shipped = presets()
    if file.is_file():
        source: Path | Traversable = file
    elif path in shipped:
        source = shipped[path]
    elif file.is_dir():
        own = file / "config.toml"
        why, way_on = ("is a run directory", f"give {own}") if own.is_file() else (
            "is a folder without config.toml: no run", "give the run.dir of a run, or a TOML file")
        raise ConfigError(f"{path} {why}", way_on)
    else:
        preset, beside = nearest(file.stem, shipped), near_path(file, ".toml")
        known = preset or beside if file.name == path and not file.suffix else beside or preset
        raise ConfigError(f"{path}: no such file, run directory or shipped preset{known}",
                          "give the path of a TOML file or of a run, or a name that "
                          "`jaxfp8rl config --presets` lists")
    try:
        return str(file) if source is file else f"{path}.toml", source.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}",
                          "make it readable, or give another file") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {e}", "save it as UTF-8") from e


def _syntax_problem(name: str, text: str, e: tomllib.TOMLDecodeError) -> str:
    at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(e))
    what = str(e)[: at.start()] if at else str(e)
    what = re.sub(r"\('(.*?)',?\)", lambda m: f"[{m[1].replace(chr(39) + ', ' + chr(39), '.')}]", what)
    line, column = (int(at[1]), int(at[2])) if at and at[1] else (text.count("\n") + 1, 1)
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    return f"{name}:{line}:{column}: not valid TOML: {what}\n    {shown}"


# --- writing


def _dump_section(name: str, section: Section) -> list[str]:
    model = type(section)
    lines, tables = [f"# {model.headline()}", f"[{name}]"], []
    for key, field in model.model_fields.items():
        value = getattr(section, key)
        if value is None:  # TOML has no null
            lines.append(f"# {key} =  # {field.description}")
        elif isinstance(value, dict) and value:
            tables += [f"[{name}.{key}]", *(f"{_toml_key(k)} = {to_toml(v)}" for k, v in value.items())]
        else:
            is_choice = typing.get_origin(field.annotation) is Literal
            choices = " | ".join(map(str, typing.get_args(field.annotation))) if is_choice else ""
            comment = ": ".join(filter(None, (choices, field.description)))
            lines.append(f"{key} = {to_toml(value)}" + (f"  # {comment}" if comment else ""))
    return [*lines, *tables, ""]


def to_toml(value: Any) -> str:
    """A value as TOML, nested tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON leaves DEL as it is, and TOML forbids it
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(k)} = {to_toml(v)}' for k, v in value.items())}}}"
    raise ConfigError(f"{value!r} has no form in TOML", "leave the key out: an absent key is TOML's null")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else to_toml(key)
