"""The player of a run."""

from __future__ import annotations

from jaxfp8rl.config.environment import offers_tools, plays
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.environments.calls import FORMS, form_of
from jaxfp8rl.environments.player import Cut, Generates, Player
from jaxfp8rl.environments.pool import Pool
from jaxfp8rl.environments.world import World
from jaxfp8rl.errors import ConfigError


def world_of(cfg: Config, tokenizer: Tokenizer) -> World:
    task, e = cfg.task, cfg.environment
    own = task.kind == "environment"
    name, options = (task.name, dict(task.options)) if own else ("", {})
    return World(name, options, task.seed, task.scorer_folder, e.timeout_s, e.max_observation, e.tools,
                 form_of_run(cfg, tokenizer) if e.tools else _form_if_any(cfg, tokenizer), task.think_tags)


def _form_if_any(cfg: Config, tokenizer: Tokenizer) -> str:
    """For an environment that may offer tools of its own: "" if neither config nor template says."""
    form = cfg.environment.tool_calls
    if not offers_tools(cfg) or form != "auto":
        return "" if form == "auto" else form
    return form_of(tokenizer.chat_template) or ""


def form_of_run(cfg: Config, tokenizer: Tokenizer) -> str:
    """The form in which the model writes tool calls. Raises ConfigError if neither config nor template
    says."""
    form = cfg.environment.tool_calls
    found = form_of(tokenizer.chat_template) if form == "auto" else form
    if found is None:
        raise ConfigError("environment.tool_calls: the chat template does not show how a call is written",
                          f"set it to one of {', '.join(FORMS)} (docs/turns.md)")
    return found


def open_player(cfg: Config, engine: Generates, tokenizer: Tokenizer, cut: Cut) -> Player | None:
    """A Player over `engine`, with its processes started; None if completions have one turn and no
    environment. Raises ConfigError if the environment cannot be made."""
    if not plays(cfg):
        return None
    e = cfg.environment
    pool = Pool(world_of(cfg, tokenizer), e.workers, e.concurrency)
    try:
        pool.wait_until_ready()
    except BaseException:
        pool.close()
        raise
    return Player(engine, pool, tokenizer, cut, e.max_turns, e.max_turn_tokens, e.lanes,
                  e.malformed_call_penalty)
