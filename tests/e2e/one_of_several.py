"""One process of a run of several. In a step, before it does anything, it may be interrupted:

    python one_of_several.py [nothing|SIGTERM|engine] STEP jaxfp8rl-words...     engine: it fails from then on
"""

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "faults")]

from micro_run import rewarded

from bridges.api import EngineUnhealthy
from bridges.engines.embedded_engine import EmbeddedEngine
from jaxfp8rl.cli.main import main
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop

what, when, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
one_step = loop.one_step


def fail(*_):
    raise EngineUnhealthy("the engine has died", "start another")


def eventful(parts, run, state, policy, step):
    if step == when and what == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if step == when and what == "engine":
        EmbeddedEngine.generate = fail
    return one_step(parts, run, state, policy, step)


RewardRunner.score, loop.one_step = rewarded, eventful
sys.exit(main(words))
