"""TOML files and command-line overrides -> `Config`, and back.

A refusal names the file, the line, the key, what was wrong and the nearest right thing, and all problems of a
file are listed at once. tomllib forgets where a key stood, so on an error `key_lines` finds it again: it
parses ever longer prefixes of the file and notes when each key first appears, which is right for multi-line
values, dotted keys and inline tables alike.
"""

from __future__ import annotations

import datetime
import functools
import importlib.resources
import json
import os
import re
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic

from jaxfp8rl.config.sampling import Run
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.section import Section
from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.other_names import key_here, plain, value_here

KeyPath = tuple[str, ...]
MAX_PROBLEMS = 10
NAMED = 4  # keys of a table that a refusal names
RESOLVED = f"# {Run.__doc__}\n[run]\n"  # so `dump_config` begins


class Override(NamedTuple):
    """One `--section.key value` of the command line."""

    flag: str
    path: KeyPath
    value: Any


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or a shipped preset by its bare name ("demo"), apply overrides and check everything.

    overrides: command-line words, `["--optim.lr", "1e-6", "--run.dir=runs/a"]`. Raises ConfigError.
    """
    name, text = _read(path := os.path.expanduser(path))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(_syntax_problem(name, text, e)) from e
    given = parse_overrides(overrides)
    if text.startswith(RESOLVED):
        _as_it_was_meant(data)
    for override in given:
        _set(data, override)
    where = _Places(name, text, given)
    try:
        cfg = _beside(Config.model_validate(data), Path(path), text)
        from jaxfp8rl.config.rules import check  # it loads jax

        return check(cfg if Path(path).is_file() else _fitted(cfg, given))
    except pydantic.ValidationError as e:
        problems = [f"{where.named(tuple(map(str, err['loc'])))}: {_explain(err)}" for err in e.errors()]
        raise _config_error(name, problems) from e
    except ConfigError as e:
        raise _place_cross_check(e, where) from e


def _as_it_was_meant(data: dict[str, Any]) -> None:
    """A resolved config names every key: one without a key of today is of a version that had none, and meant
    this."""
    run, task, optim = (data.get(name) for name in ("run", "task", "optim"))
    if not (isinstance(run, dict) and isinstance(task, dict) and isinstance(optim, dict)):
        return  # it is refused
    options = task.get("options", {})
    if not isinstance(options, dict):
        return  # likewise
    if "seed" not in task:  # the run's own drew the problems
        task["seed"] = options.pop("seed", run.get("seed", 0))
    if optim.get("schedule", "constant") != "constant":  # to 0
        optim.setdefault("min_lr_ratio", 0.0)


def _fitted(cfg: Config, given: Sequence[Override]) -> Config:
    """A preset for a run, or a warm start, that `given` makes no longer than the preset's warm-up: that one
    gives way, and this is said. A warm-up that was asked for is refused instead."""
    for section, end in (("optim", cfg.updates), ("sft", cfg.sft.steps)):
        part = getattr(cfg, section)
        if 0 < end <= part.warmup_steps and (section, "warmup_steps") not in {o.path for o in given}:
            said = f"{section}.warmup_steps: the preset's {part.warmup_steps} are cut to {end - 1}, of {end} updates in all"
            print(said, file=sys.stderr)
            cfg = cfg.model_copy(update={section: part.model_copy(update={"warmup_steps": end - 1})})
    return cfg


def of_table(data: Mapping[str, Any]) -> Config:
    """A config from a table of sections, as Python has it. Raises ConfigError."""
    try:
        from jaxfp8rl.config.rules import check  # it loads jax

        return check(Config.model_validate(dict(data)))
    except pydantic.ValidationError as e:
        raise _config_error("config", [f"{'.'.join(map(str, err['loc']))}: {_explain(err)}"
                                       for err in e.errors()]) from e


def _beside(cfg: Config, file: Path, text: str) -> Config:
    """With the folder in which the module of a scorer of one's own is looked for: the config file's. A
    resolved config has it written down."""
    if not (cfg.task.has_own_scorer and not cfg.task.scorer_folder
            and file.is_file()) or text.startswith(RESOLVED):
        return cfg
    return cfg.model_copy(
        update={"task": cfg.task.model_copy(update={"scorer_folder": str(file.absolute().parent)})})


def dump_config(cfg: Config) -> str:
    """The resolved config as TOML: every field, with its description as a comment. Loads back to an equal
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
            "is a folder without config.toml: no run", "give what run.dir was, or a TOML file")
        raise ConfigError(f"{path} {why}", way_on)
    else:
        raise ConfigError(f"{path}: no such file, nor a shipped preset{nearest(file.stem, shipped)}",
                          "give the path of a TOML file or the bare name of a preset: jaxfp8rl train demo")
    try:
        return str(file) if source is file else f"{path}.toml", source.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}",
                          "see that you may read it, or give another") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {e}", "save it as UTF-8") from e


def _syntax_problem(name: str, text: str, e: tomllib.TOMLDecodeError) -> str:
    at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(e))
    what = str(e)[: at.start()] if at else str(e)
    line, column = (int(at[1]), int(at[2])) if at and at[1] else (text.count("\n") + 1, 1)
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    return f"{name}:{line}:{column}: not valid TOML: {what}\n    {shown}"


# --- overrides


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """`--optim.lr 1e-6` and `--optim.lr=1e-6`; the value is TOML, a bare word a string, an empty one the
    absence of what may be absent. Raises ConfigError."""
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{word!r}: expected --section.key value", "for example --optim.lr 1e-6")
        if not equals:
            if not rest or re.match(r"--[A-Za-z]", rest[0]):
                raise ConfigError(f"{flag}: a value is missing", f"{flag} VALUE")
            text = rest.pop(0)
        out.append(Override(flag, tuple(flag[2:].replace("-", "_").split(".")), _parse_value(flag, text)))
    return out


def _parse_value(flag: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as e:
        if text.lstrip()[:1] in ('"', "'", "[", "{"):
            raise ConfigError(f"{flag}: {text} is not valid TOML: {e}",
                              'lists look like \'["a", "b"]\'') from e
        return text
    # a run named by its date
    is_word = len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time)
    return text if is_word else parsed["value"]


def _set(data: dict[str, Any], override: Override) -> None:
    *parents, key = override.path
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{override.flag}: {parent} is a value, not a table of keys")
    field = SECTIONS[parents[0]].model_fields.get(key) if len(parents) == 1 and parents[
        0] in SECTIONS else None
    if override.value == "" and field is not None and field.default is None:
        data.pop(key, None)  # TOML has no null: a word that is empty stands for it
    else:
        data[key] = override.value


# --- where a key stands


class _Places:
    """Where keys were given. Lines are looked up when first asked for, errors being rare."""

    def __init__(self, name: str, text: str, overrides: Sequence[Override]):
        self.name, self.text = name, text
        self.flags = {o.path: o.flag for o in overrides}

    @functools.cached_property
    def lines(self) -> dict[KeyPath, int]:
        return key_lines(self.text)

    def of(self, path: KeyPath) -> str:
        """ "--optim.lr" or "demo.toml:12"; a key that is missing has its section's place."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.flags:
                return self.flags[path[:n]]
            if path[:n] in self.lines:
                return f"{self.name}:{self.lines[path[:n]]}"
        return self.name

    def named(self, path: KeyPath) -> str:
        """The place and the key, which a flag names already."""
        place, key = self.of(path), ".".join(path)
        return place if path in self.flags else f"{place}: {key}"


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, on which each key and table of a valid TOML text is first written."""
    lines, seen, start = text.splitlines(keepends=True), {}, 1
    for n in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("".join(lines[:n]))
        except tomllib.TOMLDecodeError:
            continue  # inside a multi-line value, which began at `start`
        for path in _paths(data):
            seen.setdefault(path, start)
        start = n + 1
    return seen


def _paths(data: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


# --- what was wrong

SECTIONS: dict[str, Any] = {n: f.annotation for n, f in Config.model_fields.items()}  # name -> type[Section]
TOML_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list",
              dict: "a table"}
LIMITS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "greater than"),
          "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
EXPECTED = {"int": "an integer", "float": "a number", "string": "a string", "bool": "true or false",
            "tuple": "a list",
            "dict": "a table", "model": "a section of keys, [section]"}


def unknown_key(path: KeyPath, got: Any = None) -> str:
    """Why `path` is no key: the section it belongs to, what it is called here, or the nearest name. `got`:
    what was given, of another framework's table its keys."""
    *sections, key = path[:-1] + (plain(path[-1]),)
    if ours := key_here(".".join(path)):
        return f'unknown key: "{path[-1]}" of other frameworks is {ours} here'
    if inner := [(".".join(p), ours) for p in _paths(got)
                 if (ours := key_here(".".join(p)))] if isinstance(got, dict) else []:
        return "unknown section of other frameworks: " + ", ".join(
            f'"{name}" is {ours} here' for name, ours in inner[:NAMED])
    homes = [f"{s}.{key}" for s, model in SECTIONS.items() if key in model.model_fields]
    if ".".join((*sections, key)) in homes:
        return f'unknown key (did you mean "{key}"?)'
    if homes:
        return f'unknown key: "{path[-1]}" belongs to {" or ".join(homes)}'
    if not sections:
        everything = {f"{s}.{k}": k for s, model in SECTIONS.items() for k in model.model_fields}
        if (dotted := key.replace("_", ".", 1)) in everything:  # --run-dir
            return f'unknown section or key (did you mean "{dotted}"?)'
        close = nearest(key, [*SECTIONS, *everything.values()])
        full = next((f for f, k in everything.items() if f'"{k}"' in close), None)
        return "unknown section or key" + (f' (did you mean "{full}"?)' if full else nearest(key, SECTIONS))
    fields, words = _section_at(sections).model_fields, key.replace("_", " ")
    meant = [name for name, field in fields.items() if "_" in key and words in (field.description or "")]
    return f'unknown key (did you mean "{meant[0]}"?)' if meant else f"unknown key{nearest(key, fields)}"


def _section_at(path: Sequence[str]) -> type[Section]:
    """The section of a key's parents; of a table in a list, `task.rewards.0`, what such tables are."""
    found = SECTIONS[path[0]]
    for key in path[1:]:
        annotation = found.model_fields[key].annotation if key in found.model_fields else ()
        parts = [annotation, *typing.get_args(annotation),
                 *(b for a in typing.get_args(annotation) for b in typing.get_args(a))]
        found = next((p for p in parts if isinstance(p, type) and issubclass(p, Section)), found)
    return found


def _explain(err: Mapping[str, Any]) -> str:
    """A pydantic error as a line for the user."""
    kind, path, got = err["type"], tuple(map(str, err["loc"])), err["input"]
    if kind == "value_error":  # of a check of ours
        return str(err["ctx"]["error"])
    if kind == "extra_forbidden":
        return unknown_key(path, got)
    if kind == "missing":
        return f"missing; it has no default{_description(path)}"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", err["ctx"]["expected"])
        ours = value_here(".".join(path), got, options)
        hint = f": here it is {ours}" if ours else nearest(str(got), options)
        return f"{json.dumps(got, default=str)} is not a choice{hint}"
    if kind in LIMITS:
        key, words = LIMITS[kind]
        return f"must be {words} {err['ctx'][key]:g}, got {got}"
    if kind == "finite_number":
        return f"must be finite, got {got}"
    expected = EXPECTED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if expected is None:
        return f"{err['msg'].lower()}, got {got!r}"
    hint = f"; quote it: '\"{got}\"'" if expected == "a string" and isinstance(
        got, bool | int | float) else ""
    return f"expected {expected}, got {json.dumps(got, default=str)} ({TOML_TYPES.get(type(got), type(got).__name__)}){hint}"


def _description(path: KeyPath) -> str:
    if len(path) != 2:
        return ""
    text = SECTIONS[path[0]].model_fields[path[1]].description
    return f" ({text})" if text else ""


def _config_error(name: str, problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0], "`jaxfp8rl config demo` prints every key with its meaning")
    more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    listing = "\n  ".join(problems[:MAX_PROBLEMS] + more)
    return ConfigError(
        f"{name}: {len(problems)} problems\n  {listing}",
        "`jaxfp8rl config demo` prints every key with its meaning"
    )


def _place_cross_check(e: ConfigError, where: _Places) -> ConfigError:
    """A refusal by `Config.check`, headed by the place of a key it names: one given on the command line
    before others."""
    message = e.message
    keys = [m for m in re.findall(r"\b([a-z]+)\.([a-z_0-9]+)", message)
            if m[0] in SECTIONS] or [(message.split(":")[0],)]
    path = next((key for key in keys if key in where.flags), keys[0])
    place = where.of(path)
    if path in where.flags:  # it is named already
        message = message.removeprefix(f"{'.'.join(path)}: ")
    return ConfigError(f"{place}: {message}", e.next_step)


# --- writing


def _dump_section(name: str, section: Section) -> list[str]:
    model = type(section)
    doc = (model.__doc__ or "").strip().splitlines()[0]
    lines, tables = [f"# {doc}", f"[{name}]"], []
    for key, field in model.model_fields.items():
        value = getattr(section, key)
        if value is None:  # TOML has no null
            lines.append(f"# {key} =  # {field.description}")
        elif isinstance(value, dict) and value:
            tables += [f"[{name}.{key}]", *(f"{_toml_key(k)} = {to_toml(v)}" for k, v in value.items())]
        else:
            options = typing.get_args(field.annotation) if typing.get_origin(
                field.annotation) is Literal else ()
            choices = " | ".join(map(str, options))
            comment = ": ".join(filter(None, (choices, field.description)))
            lines.append(f"{key} = {to_toml(value)}" + (f"  # {comment}" if comment else ""))
    return [*lines, *tables, ""]


def to_toml(value: Any) -> str:
    """A value as TOML, nested tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON leaves DEL as it is, TOML forbids it
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
