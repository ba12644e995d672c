"""The process that lowers a run's programs:

    python -m jaxfp8rl.training.ahead_child FOLDER KEY < CONFIG.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.policy.routing_replay import with_options
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.training.ahead import write
from jaxfp8rl.training.programs import ahead_of, make_programs


def main(folder: str, key: str) -> None:
    """Lower the programs of the config on standard input, and keep them in `folder` under `key`."""
    cfg = Config.model_validate_json(sys.stdin.read())
    share_gpu(cfg)
    model = with_options(model_config(cfg), cfg)
    formats = expected_formats(cfg, model)
    assert formats, "the run knows the formats of its engine"
    programs = make_programs(cfg, model, engine_runs(cfg, model), formats, ONE)
    for program in ahead_of(programs, cfg, model, ONE).values():
        write(Path(folder), key, program)


if __name__ == "__main__":
    main(*sys.argv[1:])
