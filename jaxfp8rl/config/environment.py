"""The section [environment]: turns with an environment or with tools, and its rules (docs/turns.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxfp8rl.config.rule import Rule, excludes, no_effect
from jaxfp8rl.config.section import Section, listed


class Environment(Section):
    """Turns with an environment or with tools (docs/turns.md)."""

    max_turns: int = Field(
        default=8, ge=1, description="most turns of a trajectory; a turn is all that the policy writes "
                                     "before it is answered")
    max_turn_tokens: int = Field(
        default=0, ge=0,
        description="longest turn, tokens; 0: as many as are left of rollout.max_new_tokens, which counts "
                    "all turns and observations of a trajectory")
    timeout_s: float = Field(
        default=30.0, gt=0,
        description="seconds after which an environment's answer is given up; if it hangs, its "
                    "process is killed")
    workers: int = Field(
        default=0, ge=0, description="processes of environments; 0: one per core, at most 8")
    concurrency: int = Field(
        default=1, ge=1,
        description="answers that a process works on at once; more than 1 for environments with "
                    "`async` methods")
    lanes: int = Field(
        default=1, ge=1,
        description="parts of a step's groups that are played in rounds of their own: while the environments"
                    " of one answer, the engine samples for another")
    max_observation: int = Field(
        default=65536, ge=1, description="longest observation, characters; a longer one is an error of "
                                         "the environment")
    malformed_call_penalty: float = Field(
        default=0.0, ge=0, allow_inf_nan=False,
        description="reward that a turn loses for each malformed call, which its environment or its tools "
                    "count")
    tools: Annotated[tuple[str, ...], pydantic.BeforeValidator(listed)] = Field(
        default=(), strict=False,
        description='tools that the model may call before it answers: calculator, "sqlite:FILE", or your own '
        '"module:function"; the chat template writes them into the prompt')
    tool_calls: Literal["auto", "hermes", "qwen_xml", "llama", "gemma"] = Field(
        default="auto", description="how the model writes a call; auto: as its chat template says "
                                    "(docs/turns.md)")

    @property
    def has_own_tool(self) -> bool:
        """Whether a tool comes from a module or a file of the user."""
        return any(":" in tool and not tool.startswith("sqlite:") for tool in self.tools)


def plays(cfg: Any) -> bool:
    """Whether the run's completions are trajectories."""
    return cfg.task.kind == "environment" or bool(cfg.environment.tools)


def offers_tools(cfg: Any) -> bool:
    """Whether the environment may offer the model tools of its own."""
    return cfg.task.kind == "environment" and cfg.task.name in ("verifiers", "several")


WHO = 'task.kind = "environment" or environment.tools'
ENVIRONMENT = (
    Rule(lambda c: c.task.kind == "environment" and not c.task.name,
         "task.name: which environment? It needs a name", 'for example "guess", or your own "module:Class"'),
    *excludes(
        'task.name = "verifiers"', lambda c: c.task.kind == "environment" and c.task.name == "verifiers",
        Rule(lambda c: not c.task.chat, "its environments talk in messages, and task.chat = false",
             "set task.chat = true"),
        Rule(lambda c: c.task.system_prompt, "its tasks have system prompts of their own",
             "leave task.system_prompt out, or set task.options.env.taskset.system_prompt to a file"),
    ),
    *excludes(
        "environment.tools = {environment.tools}", lambda c: c.environment.tools,
        Rule(lambda c: c.task.kind == "environment",
             'task.kind = "environment" has an environment of its own', "leave environment.tools out"),
        Rule(lambda c: not (c.task.chat or c.task.kind == "file"),
             "the chat template writes the tools into the prompt, and task.chat = false",
             "set task.chat = true"),
        Rule(lambda c: "tools" in c.task.chat_template_kwargs,
             "task.chat_template_kwargs.tools would be other tools than those that answer",
             "leave task.chat_template_kwargs.tools out"),
        Rule(lambda c: len(set(c.environment.tools)) < len(c.environment.tools),
             "environment.tools names one twice", "name each once"),
    ),
    *excludes(
        WHO, plays,
        Rule(lambda c: c.rollout.in_flight,
             "rollout.in_flight interrupts completions of one turn", "leave rollout.in_flight out"),
        Rule(lambda c: c.environment.lanes > 1 and c.rollout.engine == "vllm",
             'environment.lanes = {environment.lanes}: vLLM in this process takes one call at a time',
             'set environment.lanes = 1, or rollout.engine = "served"'),
        Rule(lambda c: c.train.processes > 1,
             "train.processes = {train.processes} shares completions of one turn alone",
             "set train.processes = 1"),
        Rule(lambda c: c.moe.replay == "R3",
             'moe.replay = "R3" replays the routes of one prompt', 'set moe.replay = "R2" or "none"'),
        Rule(lambda c: c.sft.steps and c.task.kind == "environment",
             "sft.steps = {sft.steps}: there are no demonstrations of several turns",
             "set sft.steps = 0; `jaxfp8rl sft` on another task can warm the model up"),
    ),
)
IDLE_ENVIRONMENT = (
    no_effect("environment.max_turns", "environment.max_turn_tokens", "environment.timeout_s",
              "environment.workers",
              "environment.concurrency", "environment.lanes", "environment.max_observation",
              "environment.malformed_call_penalty",
              when=lambda c: not plays(c), under='task.kind = "{task.kind}" and no tools',
              instead='task.kind = "environment" or environment.tools'),
    no_effect("correction.by_turn", when=lambda c: not plays(c), under="completions of one turn",
              instead='task.kind = "environment" or environment.tools'),
    no_effect("loss.turn_advantages", when=lambda c: not plays(c), under="completions of one turn",
              instead='task.kind = "environment" or environment.tools'),
    no_effect("environment.tool_calls", when=lambda c: not c.environment.tools and not offers_tools(c),
              under="environment.tools = []",
              instead="environment.tools"),
)
