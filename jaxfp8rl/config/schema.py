"""The configuration: every setting of a run, typed, with its default, its unit and what it does.

Frozen pydantic models that refuse unknown keys. `jaxfp8rl.config.toml` reads them from TOML files and
command-line overrides and turns a refusal into a line of the file. The rules about settings that cannot go
together follow the sections; `jaxfp8rl.config.rules` has their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.curriculum import Curriculum
from jaxfp8rl.config.environment import Environment
from jaxfp8rl.config.learning import Loss, Optim, Sft
from jaxfp8rl.config.lora import Lora
from jaxfp8rl.config.noise import Noise
from jaxfp8rl.config.reference import Reference
from jaxfp8rl.config.rule import Check, Condition, Rule, excludes, no_effect
from jaxfp8rl.config.sampling import Model, Rollout, Run, Task
from jaxfp8rl.config.section import File, FloatType, Section
from jaxfp8rl.config.selection import Selection
from jaxfp8rl.errors import ConfigError

if TYPE_CHECKING:  # it loads jax
    from jaxfp8rl.precision.recipe import Recipe


class PrecisionSection(Section):
    """Which product runs in which format; see jaxfp8rl/precision/recipe.py."""

    recipe: str = Field(default="bf16",
                        description="bf16, fp8_rollout, fp8_unified, fp8_forward or fp16 (docs/precision.md)")
    compute_dtype: FloatType = Field(
        default="bfloat16", description="float type of everything that is not FP8")
    weight_dtype: FloatType = Field(
        default="bfloat16", description="float type to which the published weights are rounded")
    gradients: Literal["e4m3", "e5m2"] = Field(
        default="e4m3", description="format of the gradients in an FP8 backward pass")
    saved_activations: Literal["high", "fp8"] = Field(
        default="high",
        description="input of an FP8 product that is saved for wgrad: in high precision, or as the forward "
                    "pass's FP8 codes (Jet-RL)")
    wgrad_inputs: Literal["1x128", "128x128"] = Field(
        default="1x128",
        description="blocks in which an FP8 wgrad quantises a product's input; 128x128 is faster, with "
        "coarser scales")
    products: Literal["auto", "float32", "tensor_core", "pallas"] = Field(
        default="auto",
        description="backend of FP8 products; auto: pallas on Hopper, tensor_core on other GPUs with FP8 "
        "tensor cores")
    attention: Literal["auto", "xla", "pallas"] = Field(
        default="auto",
        description="backend of the learner's attention; auto: pallas on Hopper, in 16 bits, for heads of "
        "64 to 256")
    embedded_activations: Literal["fp8", "high"] = Field(
        default="fp8",
        description="activations of the embedded engine: in FP8 (W8A8), or in high precision (W8A16)")
    exact: Literal["off", "engine"] = Field(
        default="off",
        description="engine: the learner's log-probabilities are the embedded engine's in every bit, and "
                    "every correction weight is 1 (docs/engine.md)")
    first_layers_bf16: int = Field(default=0, ge=0, description="layers at the start that stay unquantised")
    last_layers_bf16: int = Field(default=0, ge=0, description="layers at the end that stay unquantised")
    exclude: str = Field(
        default="", description="regular expression; modules in whose HF names it is found stay unquantised")

    def resolve(self) -> Recipe:
        """Raises ConfigError for an unknown recipe."""
        from jaxfp8rl.precision.recipe import get_recipe

        return get_recipe(self.recipe)


class Train(Section):
    """How a rollout batch becomes updates. Shapes are static: rows [rows, row_tokens]."""

    row_tokens: int = Field(ge=16, description="length of a packed row, tokens")
    rows_per_microbatch: int = Field(default=8, ge=1, description="rows that go through the model at once")
    updates_per_step: int = Field(
        default=1, ge=1, description="optimiser updates per rollout batch, which is split by whole groups")
    remat: Literal["none", "layer", "products", "mlp"] = Field(
        default="none",
        description="parts of a layer that the backward pass recomputes: slower, for less memory "
        "(docs/performance.md)")
    compilation_cache: File = Field(
        default="",
        description="folder where compiled programs are kept for later runs; empty: "
        "JAX_COMPILATION_CACHE_DIR or, on a GPU, jaxfp8rl/compiled in the user's cache folder")
    shared_prefix: int = Field(
        default=0, ge=0,
        description="shortest prefix, tokens, that a row holds once for all of its sequences that begin with"
                    " it (docs/turns.md); 0: none is shared")
    data: int = Field(
        default=1, ge=1,
        description="groups of devices over which the rows of a micro-batch are split (docs/sharding.md)")
    fsdp: int = Field(
        default=1, ge=1, description="devices of a group, over which its rows and the weights are split")
    tensor: int = Field(
        default=1, ge=1,
        description="devices that share the heads, the MLP's width, the experts and the vocabulary")

    processes: int = Field(
        default=1, ge=1,
        description="processes of the learner, for example one per host or GPU, each started separately "
        "(docs/sharding.md)")

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def mesh(self) -> str:
        """The axes of more than one device, in words: "train.data = 2 * train.tensor = 4"."""
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return " * ".join(f"train.{axis} = {size}" for axis, size in sizes.items() if size > 1)

    @property
    def over_rows(self) -> int:
        """Parts into which the rows of a micro-batch are split."""
        return self.data * self.fsdp

    @property
    def over_weights(self) -> int:
        """Parts into which a weight is split."""
        return self.fsdp * self.tensor


class Moe(Section):
    """Mixtures of experts (docs/moe.md). For a dense model there is nothing to set."""

    replay: Literal["none", "R2", "R3"] = Field(
        default="none",
        description="experts that the learner computes with: its own choice every time, that of its "
        "scoring pass, or the engine's")
    measure_every: int = Field(
        default=0, ge=0,
        description="R3: steps between scoring passes without replay, for comparison; 0: never")
    balance_coef: float = Field(
        default=0.0, ge=0, description="weight of the load-balancing loss; RL usually does without")
    freeze_router: bool = Field(default=False, description="do not train the routers")


class Gate(Section):
    """The start-up check that learner and engine agree at equal weights.

    The limits separate an engine with other weights (a nat or more per token) from the noise of FP8: between
    this learner and vLLM with FP8 weights and FP8 KV, 0.01 to 0.06 nats on average were seen. The learner
    scores as in a step, under moe.replay = "R3" with the engine's routes.
    """

    completions: int = Field(default=16, ge=1, description="completions that are sampled, and scored by both")
    max_new_tokens: int = Field(
        default=256, ge=1,
        description="length of these at most, tokens; rollout.max_new_tokens if that is less")
    max_mean_gap: float = Field(
        default=0.2, gt=0, description="largest mean |learner - engine| log-probability, nats")
    max_gap: float = Field(
        default=5.0, gt=0, description="largest |learner - engine| log-probability of one token, nats")


class Monitor(Section):
    """Measurements besides those of the step itself."""

    profile_step: int = Field(
        default=0, ge=0, description="step that jax.profiler traces, for XProf, to run.dir/profile; 0: none")
    precision_every: int = Field(
        default=0, ge=0,
        description="steps between probes of the FP8 roundings (docs/precision.md); 0: never")


class Config(Section):
    """A whole run."""

    run: Run
    model: Model
    task: Task
    rollout: Rollout
    train: Train
    precision: PrecisionSection = PrecisionSection()
    loss: Loss = Loss()
    correction: Correction = Correction()
    optim: Optim = Optim()
    lora: Lora = Lora()
    moe: Moe = Moe()
    sft: Sft = Sft()
    gate: Gate = Gate()
    monitor: Monitor = Monitor()
    environment: Environment = Environment()
    curriculum: Curriculum = Curriculum()
    selection: Selection = Selection()
    reference: Reference = Reference()
    noise: Noise = Noise()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, tokens."""
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def exact(self) -> int:
        """Precision.exact: the longest sequence under precision.exact = "engine", else 0."""
        return self.max_model_len if self.precision.exact == "engine" else 0

    @property
    def lends_policy(self) -> bool:
        """Whether the embedded engine samples from the learner's own arrays, which an update takes back. It
        must not sample during one, so every completion ends before, and the arrays lie on one device."""
        return (self.rollout.engine == "jax" and not self.rollout.max_staleness and not self.lora.rank
                and self.train.processes == self.train.devices == 1)

    @property
    def keeps_reference(self) -> bool:
        """Whether the KL term draws to the policy with which the run begins, and not to a teacher."""
        return bool(self.loss.kl_coef) and not self.reference.path

    @property
    def updates(self) -> int:
        """Updates of the optimiser in all steps together."""
        return self.run.steps * self.train.updates_per_step

    def having(self, section: str, **keys: Any) -> Config:
        """A copy with other values of these keys of a section. They are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=keys)})


SECTIONS: dict[str, Any] = {n: f.annotation for n, f in Config.model_fields.items()}  # name -> type[Section]


# Rules


def _one_float_type(cfg: Any) -> None:
    """float16 is a recipe of its own: its small gradients need loss scaling, and engine and learner the same
    type."""
    recipe, used = cfg.precision.resolve(), (cfg.precision.compute_dtype, cfg.precision.weight_dtype)
    if recipe.dtype and used != (recipe.dtype, recipe.dtype):
        raise ConfigError(
            f'precision.recipe "{recipe.name}" computes in {recipe.dtype}, but precision.compute_dtype and '
            f"weight_dtype are {used[0]} and {used[1]}", f'set both to "{recipe.dtype}"')
    if "float16" in used and not recipe.dtype:
        raise ConfigError(
            f'precision.compute_dtype, weight_dtype: float16 is not for recipe "{recipe.name}"',
            'set precision.recipe = "fp16"')


def _needs_fp8(key: str, when: Condition) -> Check:
    """A format for a pass that the recipe does not run in FP8 would be ignored."""
    return no_effect(key, when=when, under='precision.recipe = "{precision.recipe}"',
                     instead='precision.recipe = "fp8_unified"')


def _multiplies_fp8(cfg: Any) -> bool:
    recipe = cfg.precision.resolve()
    return recipe.forward_fp8 or (recipe.engine_fp8 and cfg.rollout.engine == "jax")


PRECISION = (
    lambda c: c.precision.resolve(),
    _one_float_type,
    _needs_fp8("precision.gradients", lambda c: not c.precision.resolve().backward_fp8),
    _needs_fp8("precision.products", lambda c: not _multiplies_fp8(c)),
    _needs_fp8("precision.saved_activations", lambda c: not c.precision.resolve().forward_fp8),
    _needs_fp8("precision.wgrad_inputs", lambda c: not c.precision.resolve().backward_fp8),
)

EXACT = excludes(
    'precision.exact = "engine"', lambda c: c.precision.exact == "engine",
    Rule(lambda c: c.rollout.engine != "jax",
         'rollout.engine = "{rollout.engine}" adds up in an order of its own', 'set rollout.engine = "jax"'),
    Rule(lambda c: c.precision.resolve().forward_fp8 != c.precision.resolve().engine_fp8,
         'with precision.recipe = "{precision.recipe}" engine and learner compute in different formats',
         'set precision.recipe = "fp8_unified", or a recipe without FP8'),
    Rule(lambda c: c.rollout.kv_cache == "fp8" and not c.precision.resolve().forward_fp8,
         'the learner of recipe "{precision.recipe}" does not round keys and values as '
         'rollout.kv_cache = "fp8" does',
         'set rollout.kv_cache = "auto", or precision.recipe = "fp8_unified"'),
    Rule(lambda c: c.rollout.top_k or c.rollout.top_p < 1,
         "the engine normalises over the tokens that rollout.top_k and rollout.top_p leave",
         "leave out rollout.top_k and rollout.top_p"),
    Rule(lambda c: c.train.tensor > 1,
         "train.tensor = {train.tensor} splits the sums of a token over devices",
         "split over train.data or train.fsdp"),
)


def _updates_have_whole_groups(cfg: Any) -> None:
    groups, updates = cfg.rollout.prompts_per_step, cfg.train.updates_per_step
    if groups % updates:
        divisors = [n for n in range(1, groups + 1) if groups % n == 0]
        divisors.sort(key=lambda n: abs(n - updates))
        raise ConfigError(
            f"train.updates_per_step = {updates} does not divide rollout.prompts_per_step = {groups}: a "
            "group stays whole",
            f"set train.updates_per_step to {' or '.join(map(str, sorted(divisors[:2])))}")


BATCH = (
    Rule(lambda c: c.max_model_len > c.train.row_tokens,
         "train.row_tokens = {train.row_tokens} cannot hold task.max_prompt_tokens + rollout.max_new_tokens "
         "= {config.max_model_len}", "set train.row_tokens to at least {config.max_model_len}"),
    _updates_have_whole_groups,
)

SHARED = excludes(
    "train.shared_prefix = {train.shared_prefix}", lambda c: c.train.shared_prefix,
    Rule(lambda c: c.precision.exact == "engine",
         'precision.exact = "engine" adds up over the whole sequence of a token',
         'set train.shared_prefix = 0'),
    Rule(lambda c: c.moe.balance_coef, "moe.balance_coef counts the experts of shared tokens once",
         "set moe.balance_coef = 0"),
)


def _is_for(learner: str, setting: str, given: Condition) -> Rule:
    return Rule(given, f"{setting} is for a learner {learner}", f"leave out {setting}")


PROCESSES = excludes(
    "train.processes = {train.processes}", lambda c: c.train.processes > 1,
    _is_for("in one process", "rollout.max_staleness", lambda c: c.rollout.max_staleness),
    _is_for("in one process", "rollout.in_flight", lambda c: c.rollout.in_flight),
    _is_for("in one process", 'moe.replay = "R3"', lambda c: c.moe.replay == "R3"),
    _is_for("in one process", "loss.calibrate_clip_every", lambda c: c.loss.calibrate_clip_every),
) + (
    Rule(lambda c: c.train.devices % c.train.processes,
         "train.processes = {train.processes} does not divide train.data * train.fsdp * train.tensor = "
         "{train.devices}: each process has as many devices",
         "spread the learner over all devices of all processes, for example one process a GPU"),
)


def _devices_have_whole_rows(cfg: Any) -> None:
    rows, parts = cfg.train.rows_per_microbatch, cfg.train.over_rows
    if rows % parts:
        axes = cfg.train.mesh.partition(" * train.tensor")[0]
        raise ConfigError(
            f"{axes} does not divide train.rows_per_microbatch = {rows}: a device has whole rows",
            f"set train.rows_per_microbatch = {-(-rows // parts) * parts}")


MESH = excludes(
    "{train.mesh}", lambda c: c.train.devices > 1,
    _is_for("on one device", "rollout.one_copy", lambda c: c.rollout.one_copy),
    _is_for("on one device", "monitor.precision_every", lambda c: c.monitor.precision_every),
    _is_for("on one device", 'rollout.kv_scales = "calibrated"',
            lambda c: c.rollout.kv_scales == "calibrated"),
    _is_for("on one device", "optim.offload", lambda c: c.optim.offload),
    Rule(lambda c: c.train.data > 1 and c.optim.gradient_sums != "float32",
         'optim.gradient_sums = "{optim.gradient_sums}": train.data = {train.data} adds the sums of devices, '
         "which would round them once more", 'split over train.fsdp, or set optim.gradient_sums = "float32"'),
) + (_devices_have_whole_rows,)

IDLE_EMBEDDED = (
    no_effect("precision.embedded_activations", when=lambda c: c.rollout.engine != "jax",
              under='rollout.engine = "{rollout.engine}"', instead='rollout.engine = "jax"'),
    no_effect("precision.embedded_activations", when=lambda c: not c.precision.resolve().engine_fp8,
              under='precision.recipe = "{precision.recipe}"', instead="an FP8 recipe"),
)

IDLE_REPLAY = (
    no_effect("moe.measure_every", when=lambda c: c.moe.replay != "R3",
              under='moe.replay = "{moe.replay}"', instead='moe.replay = "R3"'),
)

IDLE_PROBES = (
    no_effect("monitor.precision_every",
              when=lambda c: not (c.precision.resolve().engine_fp8 or c.rollout.kv_cache == "fp8"),
              under='precision.recipe = "{precision.recipe}"', instead="an FP8 recipe or cache"),
)

IDLE_SCORING = (
    no_effect("moe.measure_every", when=lambda c: c.loss.old_policy != "recomputed",
              under='loss.old_policy = "{loss.old_policy}"', instead='loss.old_policy = "recomputed"'),
)
