"""What stands below the options in `jaxfp8rl --help` and in the help of each command."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from jaxfp8rl.cli.settings import overview
from jaxfp8rl.errors import ConfigError, nearest

CONFIG_IS = "CONFIG is a TOML file or the name of a shipped preset (`jaxfp8rl config --presets`)."
EXAMPLES = """\
  jaxfp8rl doctor                                      check whether this machine can run jaxfp8rl
  jaxfp8rl train demo                                  the arithmetic demo, three minutes on two CPU cores
  jaxfp8rl train demo --rollout.engine vllm            the same with vLLM, on a GPU (on a CPU: make demo-vllm)
  jaxfp8rl train demo --optim.lr 3e-4 --run.dir runs/b another learning rate, another run directory
  jaxfp8rl sft demo                                    only the warm start, into runs/demo/sft
  jaxfp8rl train demo --dry-run                        resolved config, memory plan, checks without a GPU
  jaxfp8rl report runs/demo                            the run as one HTML page
  jaxfp8rl train runs/demo --resume                    continue a run from its newest checkpoint
  jaxfp8rl eval runs/demo --k 1 4 --samples 8          pass@k on held-out problems
  jaxfp8rl export runs/demo out --format fp8           an HF folder for vLLM or transformers
  jaxfp8rl quantize models/Qwen3-8B out --format nvfp4 a folder in four bits, to train adapters over
  jaxfp8rl launch mine.toml --dry-run                  what runs where, of several processes and engines
  jaxfp8rl experiment check adder                      many runs that one file describes: cells, cost
  jaxfp8rl random-model Qwen3-8B models/Qwen3-8B       random weights, to try the preset qwen3-8b-h100 with
  jaxfp8rl serve-training mine.toml                    let the `tinker` client train and sample
  jaxfp8rl config --find lr                            search the settings for lr; without --find: list all
  jaxfp8rl config --find num_generations               what another framework's setting is called here
"""
SETTINGS = """\
Every setting of CONFIG is an option, --section.key VALUE (`jaxfp8rl config` describes each):

"""

MEANT = {  # what a user types who does not know the command -> the command
    "check": "jaxfp8rl train CONFIG --dry-run", "run": "jaxfp8rl train CONFIG",
    "resume": "jaxfp8rl train RUN --resume", "presets": "jaxfp8rl config --presets",
    "serve": "jaxfp8rl serve-training CONFIG, or `vllm serve` with our plugin (docs/vllm_server.md)",
}


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are ours, with the nearest choice and the next step."""

    def error(self, message: str) -> NoReturn:
        if bad := re.match(r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message = f'{bad[1]}: "{bad[2]}" is not a choice{nearest(bad[2], re.findall("[^\', ]+", bad[3]))}'
        missing = re.match(r"the following arguments are required: (.+)", message)
        raise ConfigError(f"{missing[1]}: missing" if missing else message.removeprefix("argument "),
                          usage(self))


def usage(parser: argparse.ArgumentParser) -> str:
    """The words of the command, on one line."""
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def epilog(command: str = "", reads_config: bool = False) -> str:
    """The examples of `command`, or of all, and what CONFIG and its settings are where it reads one."""
    examples = [line for line in EXAMPLES.splitlines() if command in ("", line.split()[1])]
    parts = [CONFIG_IS] if reads_config or not command else []
    parts += ["\n".join(["Examples:", "", *examples])] if examples else []
    return "\n\n".join([*parts, SETTINGS + overview()] if reads_config else parts)
