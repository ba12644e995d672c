"""What a server computes with: the programs, the engine, the tokenizer, and the folder of saved weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfp8rl.config.lora import ATTENTION, MLP
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.tokenizer import check_fits, load_tokenizer
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.loading import check_weights
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.engines import build_engine, check_engine_settings
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.sampler import Sampler, Snapshot
from jaxfp8rl.serving.saved import Place, Saved
from jaxfp8rl.serving.trainer import Programs, Trainee
from jaxfp8rl.training.preflight import check_shape
from jaxfp8rl.types import TrainState


def check_config(cfg: Config) -> None:
    """Raise ConfigError, which names the setting, for a config that this server does not serve."""
    check(cfg)
    check_engine_settings(cfg)
    refused = {
        'rollout.engine = "jax" or "vllm"': cfg.rollout.engine == "served",
        "one device (train.data, fsdp and tensor are 1)": cfg.train.devices != 1,
        'moe.replay = "none"': cfg.moe.replay != "none",
        "moe.balance_coef = 0": bool(cfg.moe.balance_coef),
        "rollout.one_copy = false": cfg.rollout.one_copy,
        'rollout.speculation other than "head"': cfg.rollout.speculation == "head",
        'rollout.kv_scales other than "calibrated"': cfg.rollout.kv_scales == "calibrated",
        "sft.steps = 0": bool(cfg.sft.steps),
        "noise.start = 0": bool(cfg.noise.start),
        "rollout.temperature = 1": cfg.rollout.temperature != 1,
        "rollout.top_k = 0": bool(cfg.rollout.top_k),
        "rollout.top_p = 1": cfg.rollout.top_p != 1,
        "no rollout.stop and no rollout.stop_token_ids: clients give their own":
            bool(cfg.rollout.stop or cfg.rollout.stop_token_ids),
        "no lora.path: models begin with fresh adapters, or with a saved state": bool(cfg.lora.path),
        'lora.publish = "adapters"': cfg.lora.rank > 0 and cfg.lora.publish != "adapters",
    }
    for wanted, wrong in refused.items():
        if wrong:
            typed = re.fullmatch(r"([a-z.]+[a-z_]*) = (\S+)", wanted)
            how = f"--{typed[1]} {typed[2]}" if typed else "change it"
            raise ConfigError(f"serve-training needs {wanted}", f"{how}; docs/tinker.md says what is served")


class Learner:
    """cfg: that `check_config` takes. at_once: how many adapters the engine holds, if the config has any.
    Raises UserErrors: those of the model's shape, the weights' headers, the tokenizer and the engine."""

    def __init__(self, cfg: Config, name: str, folder: Path, at_once: int = 1):
        self.cfg, self.name, self.model = cfg, name, model_config(cfg)
        runs = check_shape(cfg, self.model)
        if cfg.model.path:
            check_weights(cfg.model.path, self.model)
        self.tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path)
        check_fits(self.tokenizer, self.model.vocab_size)
        self._engine, transport = build_engine(cfg, self.model, runs, named=at_once if cfg.lora.rank else 0)
        try:
            self.programs = Programs(cfg, self.model, runs, self._engine.capabilities().formats)
        except BaseException:
            self._engine.close()
            raise
        self.sampler = Sampler(self.programs, self.tokenizer, self._engine, transport)
        self.saved = Saved(folder, name)

    def close(self) -> None:
        self._engine.close()

    def check_name(self, base_model: str) -> None:
        """Raise Refused for another base model. What stands after a colon (":peft:262144") chooses a service
        of Tinker's own."""
        if base_model.partition(":")[0] != self.name:
            raise Refused(f"base_model {base_model!r}: this server's model is {self.name!r}",
                          f'base_model="{self.name}"')

    def info(self) -> dict[str, Any]:
        """`model_data` of GetInfoResponse."""
        tokenizer = self.cfg.model.tokenizer or self.cfg.model.path
        return {"arch": self.model.architecture, "model_name": self.name,
                "tokenizer_id": None if tokenizer.startswith("chars:")
                else str(Path(tokenizer).expanduser().resolve())}

    def lora(self) -> dict[str, Any]:
        """What answers say about adapters."""
        return {"is_lora": self.cfg.lora.rank > 0, "lora_rank": self.cfg.lora.rank or None}

    def check_lora(self, asked: Any) -> None:
        """Raise Refused for a LoraConfig of other adapters than this server's."""
        lora = self.cfg.lora
        if asked.rank != lora.rank:
            raise Refused(f"rank={asked.rank}: this server's adapters have rank {lora.rank}",
                          f"rank={lora.rank}, or start the server with lora.rank = {asked.rank}")
        for name, wanted, linears in (("train_attn", asked.train_attn, ATTENTION),
                                      ("train_mlp", asked.train_mlp, MLP)):
            has = not set(linears).isdisjoint(lora.targets)
            if has != wanted:
                raise Refused(f"{name}={wanted}: this server's adapters are those of "
                              f"{', '.join(lora.targets)}",
                              f"{name}={has}, or start the server with other lora.targets")

    def new_trainee(self, seed: int | None = None) -> Trainee:
        return Trainee(self.programs, self.programs.new_state(seed))

    def trainee_of(self, state: TrainState) -> Trainee:
        return Trainee(self.programs, state)

    def load_state(self, place: Place, optimizer: bool) -> TrainState:
        """The state that was saved there, its moments at zero unless `optimizer`."""
        self._check_base(place)
        state = self.saved.load(place, self.programs.state_shapes())
        if optimizer:
            return state
        # jnp.zeros_like makes nothing in host memory, where optim.offload keeps moments
        anew = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        return state._replace(opt_state=jax.tree.map(anew, state.opt_state), step=anew(state.step))

    def snapshot(self, place: Place | None) -> Snapshot:
        """Weights that were saved for sampling; None: the base model's."""
        if place is None:
            return Snapshot(self.programs.policy(self.programs.new_state().params))
        self._check_base(place)
        return Snapshot(self.programs.whole(self.saved.load(place, self.programs.own_shapes())))

    def save(self, place: Place, tree: Any, overwrite: bool, metadata: dict[str, str] | None) -> str:
        """Write a state, or a model's own part of a policy -> its path. Raises as Saved.save does."""
        facts = {"user_metadata": metadata or {}, "lora": self._adapters()}
        return self.saved.save(place, tree, overwrite, facts)

    def _adapters(self) -> dict[str, Any]:
        """What must be the same where adapters are loaded again."""
        lora = self.cfg.lora
        return {"rank": lora.rank, "scale": lora.scale, "targets": list(lora.targets),
                "base": self.programs.base_digest} if lora.rank else {}

    def _check_base(self, place: Place) -> None:
        """Raise Refused for adapters of another shape, scale or base than this server's."""
        found, mine = self.saved.check(place).get("lora", {}), self._adapters()
        if found != mine:
            apart = [f"{name}: {found.get(name, 'none')}, here {mine.get(name, 'none')}"
                     for name in found | mine if found.get(name) != mine.get(name)]
            raise Refused(f"{place} was saved by a server of other adapters or another base: "
                          f"{'; '.join(apart)}",
                          "start a server with that base and that [lora]")
