"""What a server computes with: the programs, the engine, the tokenizer, and the folder of saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.tokenizer import check_fits, load_tokenizer
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.loading import check_weights
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.engines import build_engine, check_engine_settings, expected_formats
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.sampler import Sampler, Snapshot
from jaxfp8rl.serving.saved import Place, Saved
from jaxfp8rl.serving.trainer import Programs, Trainee
from jaxfp8rl.types import TrainState


def check_config(cfg: Config) -> None:
    """Raise ConfigError, which names the setting, for a config that this server does not serve."""
    check(cfg)
    check_engine_settings(cfg)
    refused = {
        'rollout.engine = "jax"': cfg.rollout.engine != "jax",
        "one device (train.data, fsdp and tensor are 1)": cfg.train.devices != 1,
        'moe.replay = "none"': cfg.moe.replay != "none",
        "moe.balance_coef = 0": bool(cfg.moe.balance_coef),
        "rollout.one_copy = false": cfg.rollout.one_copy,
        'rollout.kv_scales other than "calibrated"': cfg.rollout.kv_scales == "calibrated",
        "sft.steps = 0": bool(cfg.sft.steps),
        "rollout.temperature = 1": cfg.rollout.temperature != 1,
    }
    for wanted, wrong in refused.items():
        if wrong:
            raise ConfigError(f"serve-training needs {wanted}", "set it; docs/tinker.md says what is served")


class Learner:
    """Raises UserErrors: those of the config, the weights' headers, the tokenizer and the engine."""

    def __init__(self, cfg: Config, name: str, folder: Path):
        check_config(cfg)
        self.cfg, self.name, self.model = cfg, name, model_config(cfg)
        if cfg.model.path:
            check_weights(cfg.model.path, self.model)
        self.tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path)
        check_fits(self.tokenizer, self.model.vocab_size)
        runs, formats = engine_runs(cfg, self.model), expected_formats(cfg, self.model)
        assert formats is not None  # those of the embedded engine are always known
        self.programs = Programs(cfg, self.model, runs, formats)
        self._engine, transport = build_engine(cfg, self.model, runs)
        self.sampler = Sampler(self.programs, self.tokenizer, self._engine, transport)
        self.saved = Saved(folder, name)

    def close(self) -> None:
        self._engine.close()

    @property
    def longest(self) -> int:
        """The most tokens of a datum."""
        return min(self.cfg.train.row_tokens, self.model.max_position_embeddings)

    def check_name(self, base_model: str) -> None:
        """Raise Refused for another base model. What stands after a colon (":peft:262144") chooses a service of
        Tinker's own."""
        if base_model.partition(":")[0] != self.name:
            raise Refused(f"base_model {base_model!r}: this server's model is {self.name!r}",
                          f'base_model="{self.name}"')

    def info(self) -> dict[str, Any]:
        """`model_data` of GetInfoResponse."""
        tokenizer = self.cfg.model.tokenizer or self.cfg.model.path
        return {"arch": self.model.architecture, "model_name": self.name,
                "tokenizer_id": None if tokenizer.startswith("chars:") else str(Path(tokenizer).expanduser().resolve())}

    def new_trainee(self) -> Trainee:
        return Trainee(self.programs, self.programs.new_state())

    def trainee_of(self, state: TrainState) -> Trainee:
        return Trainee(self.programs, state)

    def load_state(self, place: Place, optimizer: bool) -> TrainState:
        """The state that was saved there, its moments at zero unless `optimizer`."""
        state = self.saved.load(place, self._state_shapes())
        if optimizer:
            return state
        return state._replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state),
                              step=jnp.zeros_like(state.step))

    def snapshot(self, place: Place | None) -> Snapshot:
        """Weights that were saved for sampling; None: the base model's."""
        if place is None:
            return Snapshot(self.programs.policy(self.programs.new_state().params))
        like = ONE.placed_shapes(jax.eval_shape(self.programs.policy, self._state_shapes().params))
        return Snapshot(self.saved.load(place, like))

    def _state_shapes(self) -> TrainState:
        return self.programs.state_shapes()
