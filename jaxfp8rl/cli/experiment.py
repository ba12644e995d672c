"""`jaxfp8rl experiment`: check, run, watch and report an experiment that a file describes."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxfp8rl.errors import ConfigError, check_writable

if TYPE_CHECKING:  # it loads jax, which the other commands need not wait for
    from jaxfp8rl.experiments.cells import Cell
    from jaxfp8rl.experiments.protocol import Experiment
    from jaxfp8rl.experiments.runner import Files

ACTIONS = {
    "check": "check the config of every cell, and predict what the grid will cost",
    "run": "run the cells that are not done, several at once",
    "status": "list the cells and how far each is",
    "report": "write the page and the charts",
}


def add_options(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line; `command` makes its parser."""
    parser = command("experiment", _run, "run an experiment: many runs that one file describes", config=False)
    parser.add_argument("action", choices=tuple(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("experiment", metavar="NAME",
                        help="a file of experiments/, or the path of a TOML file")
    parser.add_argument("--pilot", action="store_true", help="the pilot's cells in place of the grid's")
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="cells at once, on each GPU no more than fit; default: one for two cores")
    parser.add_argument("--minutes", type=float, metavar="M",
                        help="end this command after so many minutes; cells save, and the same command goes "
                        "on")
    parser.add_argument("--only", nargs="+", metavar="CELL",
                        help="these cells alone, by the names in `status`")
    parser.add_argument("--work", metavar="DIR",
                        help="folder of the runs, their checkpoints and logs; default: runs/experiments/NAME")
    parser.add_argument("--results", metavar="DIR",
                        help="folder of the lines; default: results/NAME beside the protocol")
    parser.add_argument("--out", metavar="FILE",
                        help="report: the page to write; default: docs/experiments/NAME.md")
    parser.add_argument("--against", metavar="AXIS=VALUE",
                        help="report: no page; print how far each arm lies from the one with this value and "
                        "otherwise the same")


def _run(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.experiments.protocol import load_protocol
    from jaxfp8rl.experiments.runner import Files

    for option in ("jobs", "minutes"):
        if (value := getattr(args, option)) is not None and value <= 0:
            raise ConfigError(f"--{option} {value:g}: it must be more than 0",
                              "leave it out, or give a larger one")
    found = load_protocol(args.experiment)
    files = Files(Path(args.work or Path("runs") / "experiments" / found.name),
                  Path(args.results) if args.results else found.results)
    if args.action == "report":
        from jaxfp8rl.experiments.report import against, write_report

        if args.against:
            return print(against(found, files.results, args.against, args.pilot))
        name = f"{found.name}-pilot" if args.pilot else found.name
        out = Path(args.out or f"docs/experiments/{name}.md")
        return print(write_report(found, files.results, out, args.pilot))
    {"check": _check, "run": _start, "status": _status}[args.action](args, found, files)


@contextlib.contextmanager
def _lines_once() -> Iterator[None]:
    """Each line that goes to stderr meanwhile appears once: every arm's config may say the same."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        for line in dict.fromkeys(said.getvalue().splitlines()):
            print(line, file=sys.stderr)


def _chosen(args: argparse.Namespace, found: Experiment) -> list[Cell]:
    """The cells that the command is about."""
    from jaxfp8rl.errors import nearest
    from jaxfp8rl.experiments.cells import cells

    with _lines_once():
        all_of_them = {cell.name: cell for cell in cells(found, args.pilot)}
    for name in args.only or ():
        if name not in all_of_them:
            raise ConfigError(f"--only {name}: no such cell{nearest(name, all_of_them)}",
                              f"jaxfp8rl experiment status {args.experiment}")
    return [all_of_them[name] for name in args.only or all_of_them]


def _check(args: argparse.Namespace, found: Experiment, files: Files) -> None:
    from jaxfp8rl.experiments.cells import cells
    from jaxfp8rl.experiments.preflight import check_data
    from jaxfp8rl.experiments.results import read_results
    from jaxfp8rl.experiments.status import forecast, power_line, unfinished

    with _lines_once():
        both = {"pilot": cells(found, True), "grid": cells(found)}
    print(*check_data([*both["grid"], *both["pilot"]]), sep="\n")
    results = read_results(files.results)
    for name, of in both.items():
        seeds = len({cell.seed for cell in of})
        print(f"{name}: {len(of)} cells, {seeds} seed{'s' * (seeds > 1)}; "
              f"{forecast(found, unfinished(of, files), results)}")
    print(power_line(found, results))


def _start(args: argparse.Namespace, found: Experiment, files: Files) -> None:
    from jaxfp8rl.experiments.runner import Runner
    from jaxfp8rl.experiments.slots import slots
    from jaxfp8rl.experiments.status import unfinished
    from jaxfp8rl.gpus import gpus

    chosen = _chosen(args, found)
    for folder in (files.work, files.results):
        check_writable(folder)
    left = unfinished(chosen, files)
    if left:
        cfgs = [cfg for cell in left for cfg in (cell.cfg, cell.warm) if cfg]
        places = slots(cfgs, gpus(), args.jobs)
        print(f"{len(left)} of {len(chosen)} cells to run, {len(places)} at once", flush=True)
        Runner(found, files, places, args.minutes, say=lambda line: print(line, flush=True)).run(chosen)
    done = len(chosen) - len(unfinished(chosen, files))
    more = "" if done == len(chosen) else ": the same command goes on"
    print(f"{done} of {len(chosen)} cells are done{more}")


def _status(args: argparse.Namespace, found: Experiment, files: Files) -> None:
    from jaxfp8rl.experiments.status import state, unfinished

    chosen = _chosen(args, found)
    wide = max(len(cell.name) for cell in chosen)
    for cell in chosen:
        print(f"{cell.name:{wide}}  {state(cell, files)}")
    print(f"{len(chosen) - len(unfinished(chosen, files))} of {len(chosen)} cells are done")
