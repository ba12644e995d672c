"""Protocols: the cells that they describe, and what is said about a wrong one."""

from __future__ import annotations

import pytest
from small_protocol import SMALL, small

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.experiments.cells import cells
from jaxfp8rl.experiments.protocol import load_protocol

AXIS = '[grid.correction]\nnone = { correction = { preset = "none", allow_uncorrected_fp8 = true } }\n' \
    'token_tis = { correction.preset = "token_tis" }\n\n[budget]'
TWO = (("[budget]", AXIS), ('{ recipe = "bf16" }\n\n', '{ recipe = "bf16", correction = "none" }\n\n'))


def test_cells_are_all_arms_at_all_seeds_with_their_configs(tmp_path):
    found = cells(small(tmp_path))
    assert [cell.name for cell in found] == [
        "bf16-s0", "fp8-s0", "bf16-s1", "fp8-s1", "bf16-s2", "fp8-s2"]
    cfg = found[3].cfg
    assert (cfg.run.seed, cfg.run.steps, cfg.run.eval_every, cfg.precision.recipe) == (1, 4, 2, "fp8_unified")
    assert [c.name for c in cells(small(tmp_path), pilot=True)][:2] == ["pilot-bf16-s10", "pilot-fp8-s10"]


def test_combinations_are_left_out(tmp_path):
    left = ("[settings]", 'exclude = [{ recipe = "fp8", correction = ["none"] }]\n\n[settings]')
    names = [cell.name for cell in cells(small(tmp_path, *TWO, left)) if not cell.seed]
    assert names == ["bf16-none-s0", "bf16-token_tis-s0", "fp8-token_tis-s0"]


def test_a_pilot_may_have_some_arms_alone(tmp_path):
    experiment = small(tmp_path, ("[10, 11]", '[10, 11]\narms = [{ recipe = "fp8" }]'))
    assert [cell.name for cell in cells(experiment, pilot=True)] == ["pilot-fp8-s10", "pilot-fp8-s11"]


def test_a_pilot_whose_arms_are_left_out_is_refused(tmp_path):
    left = ("[settings]", 'exclude = [{ recipe = "fp8" }]\n\n[settings]')
    experiment = small(tmp_path, left, ("[10, 11]", '[10, 11]\narms = [{ recipe = "fp8" }]'))
    assert len(cells(experiment)) == 3
    with pytest.raises(ConfigError, match="pilot.arms: no arm of the grid is left"):
        cells(experiment, pilot=True)


def test_the_hash_of_a_cell_is_of_what_it_computes(tmp_path):
    digests = [cell.digest for cell in cells(small(tmp_path))]
    assert len(set(digests)) == len(digests)
    elsewhere = small(tmp_path, ("sft.steps = 0", 'sft.steps = 0\ntrain.compilation_cache = "/tmp/x"'))
    assert [cell.digest for cell in cells(elsewhere)] == digests
    assert [cell.digest for cell in cells(small(tmp_path, ("steps = 4", "steps = 5")))] != digests
    commented = small(tmp_path, ("[budget]", "# a comment\n[budget]"))
    assert [cell.digest for cell in cells(commented)] == digests
    assert commented.digest != small(tmp_path).digest


def test_a_shared_warm_start_counts_in_the_hash(tmp_path):
    warm = lambda lr: small(tmp_path, ("[grid.recipe]",
                                       f"[warm_start]\nsft = {{ steps = 3, warmup_steps = 0, lr = {lr} }}"
                                                        "\n\n[grid.recipe]"))
    one, two = (cells(warm(lr))[0] for lr in (1e-3, 2e-3))
    assert one.warm and one.warm.sft.lr == 1e-3 and one.digest != two.digest


WRONG = {
    "an unknown key": ("alpha = 0.05", "alfa = 0.05",
                       r'small.toml:24: outcome.alfa: unknown key \(did you mean "alpha"\?\)'),
    "a missing key": ('hypothesis = "It does."\n', "", "hypothesis: missing"),
    "a type": ("minutes = 5", 'minutes = "5"', "small.toml:20: budget.minutes: expected a number"),
    "a choice": ("alpha = 0.05", 'measure = "last"', '"last" is not a choice'),
    "a config": ('"demo"', '"demi"',
        r'small.toml:4: config: demi: no such file, nor a shipped preset \(did you mean "demo"'),
    "a key of a config": ('{ precision.recipe = "fp8_unified" }', '{ precision.recip = "fp8_unified" }',
                          r'small.toml:16: grid.recipe.fp8.precision.recip: unknown key '
                          r'\(did you mean "recipe"\?\)'
                          "\n  in arm fp8"),
    "a value of a config": ('"fp8_unified"', '"fp8_unfied"',
        r"small.toml:16: grid.recipe.fp8.precision.recipe: .*fp8_unified"),
    "a key of the settings": ("sft.steps", "sft.step",
        r'small.toml:11: settings.sft.step: unknown key \(did you mean "steps"'),
    "settings that cannot go together": (
        "sft.steps = 0", 'sft.steps = 0\ncorrection.preset = "none"',
        r'small.toml:\d+: .*samples in FP8 and correction.preset = "none"(.|\n)*in arm fp8'),
    "a control": ('recipe = "bf16" }\n\n', 'recipe = "bf61" }\n\n',
                  r'small.toml:6: control: grid.recipe has no value "bf61" \(did you mean "bf16"'),
    "an axis": ('recipe = "bf16" }\n\n', 'recip = "bf16" }\n\n',
                r'control: the grid has no axis "recip" \(did you mean "recipe"'),
    "a seed of the pilot": ("[10, 11]", "[2, 11]",
        "small.toml:27: pilot.seeds: seed 2 is also one of the grid"),
    "a seed twice": ("[0, 1, 2]", "[0, 1, 1]", "seeds: a seed stands there twice"),
    "two margins": ("margin = 0.1", "margin = 0.1\nmargin_of_gain = 0.3",
        "`margin` or `margin_of_gain`, one of the two"),
    "a name": ("bf16 = { precision", '"b-f" = { precision', 'the name "b-f" has other characters'),
    "no checkpoints": ("save_every = 1", "save_every = 0",
        "run.save_every = 0: a cell that was ended could not go on"),
    "steps beside the budget": ("save_every = 1", "save_every = 1, steps = 7",
        "settings.run.steps: the experiment sets this key itself\n  in arm bf16"),
    "a seed of a cell": ('{ precision.recipe = "bf16" }', '{ precision.recipe = "bf16", run.seed = 7 }',
        r"small.toml:15: grid.recipe.bf16.run.seed: the experiment sets this key itself"),
    "a metric": ("margin = 0.1", 'margin = 0.1\nmetric = "eval/reward_meen"',
        r'small.toml:24: outcome.metric: .*no such metric \(did you mean "eval/reward_mean"\?\)'),
    "a metric of a step": ("margin = 0.1", 'margin = 0.1\nmetric = "response/lenght_mean"',
        r'small.toml:24: outcome.metric: .*no such metric \(did you mean "response/length_mean"\?\)'),
    "no arm": ("seeds = [0, 1, 2]\ncontrol = { recipe = \"bf16\" }\n",
        'seeds = [0, 1, 2]\nexclude = [{ recipe = ["bf16", "fp8"] }]\n',
        "small.toml:6: exclude: no arm of the grid is left"),
    "TOML": ("seeds = [0, 1, 2]", "seeds = [0, 1, 2", "not valid TOML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_protocol_names_its_line_and_the_nearest_right_thing(case, tmp_path):
    old, new, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        cells(small(tmp_path, (old, new)))


def test_a_control_that_is_left_out_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="control: it is among the combinations"):
        small(tmp_path, ("[settings]", 'exclude = [{ recipe = "bf16" }]\n[settings]'))
    with pytest.raises(ConfigError, match="control: it names no value of the axis correction"):
        small(tmp_path, TWO[0])


def test_an_experiment_is_found_by_name_and_an_unknown_one_has_a_nearest(tmp_path, monkeypatch):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    assert load_protocol("mine").results.as_posix() == "experiments/results/mine"
    with pytest.raises(ConfigError, match=r'mime: no such experiment \(did you mean "mine"\?\)'):
        load_protocol("mime")


def test_a_config_file_lies_beside_the_protocol(tmp_path):
    from jaxfp8rl.config.toml import dump_config, load_config

    (tmp_path / "base.toml").write_text(dump_config(load_config("demo", ["--optim.lr", "0.5"])))
    assert cells(small(tmp_path, ('"demo"', '"base.toml"')))[0].cfg.optim.lr == 0.5
