"""`jaxfp8rl completion SHELL`: print a script, made by shtab, for completing commands, options, settings and
presets in a shell."""

from __future__ import annotations

import argparse

from jaxfp8rl.cli.bench import FOLDER, benchmarks
from jaxfp8rl.cli.settings import settings
from jaxfp8rl.config.toml import presets

SHELLS = ("bash", "zsh", "fish")


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script for one of SHELLS. It modifies `parser`: every setting becomes an option of each
    command that takes a config."""
    import shtab

    from jaxfp8rl.experiments.protocol import known_experiments
    from jaxfp8rl.models.known import KNOWN  # loads numpy

    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in ("directory", "runs", "out", "gguf", "folder"):
                action.complete = shtab.FILE
            elif action.dest == "fork":
                action.complete = shtab.DIRECTORY
            elif action.dest == "shape":
                action.choices = list(KNOWN)
            elif action.dest == "diff":
                action.choices = [*sorted(presets()), shtab.Choice("file")]
            elif action.dest == "experiment":
                action.choices = [*known_experiments(), shtab.Choice("file")]
            elif action.dest == "name" and FOLDER.is_dir():  # a package installed alone has no benchmarks
                action.choices = sorted(benchmarks())
        config = next((action for action in command._actions if action.dest == "config"), None)
        if config is not None:
            config.choices = [*sorted(presets()), shtab.Choice("file")]
            _add_settings(command)
    return shtab.complete(parser, shell)


def _add_settings(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("settings")
    for setting in settings():
        group.add_argument(f"--{setting.name}", help=setting.description, choices=setting.choices or None)
