"""Names of other frameworks: a hint wherever one is typed, found by `config --find`, and on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxfp8rl.cli import main
from jaxfp8rl.cli.settings import find, settings
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.presets import PRESETS
from jaxfp8rl.other_names import KEYS, VALUES, here, index, names

PAGE = Path("docs/coming_from.md").read_text()


@pytest.mark.parametrize("words, says", [
    (["--loss.objective", "grpo"], 'loss.objective = "ppo_clip" with loss.advantage = "grpo"'),
    (["--loss.objective", "dapo"], 'loss.objective = "ppo_clip" with loss.clip_high = 0.28'),
    (["--loss.objective", "geo_mean"], 'here it is loss.objective = "gmpo"'),
    (["--loss.advantage", "rloo_baseline"], 'here it is loss.advantage = "rloo"'),
    (["--loss.objective", "bnpo"], 'loss.objective = "ppo_clip" with loss.aggregation = "token_mean"'),
    (["--loss.objective", "luspo"], 'loss.objective = "gspo" with loss.aggregation = "seq_mean_token_sum"'),
    (["--loss.objective", "binary_kl"], 'here it is loss.objective = "dppo_kl"'),
    (["--loss.advantage", "reinforce_plus_plus"], 'here it is loss.advantage = "reinforce_pp"'),
    (["--loss.advantage", "reinforce++-baseline"], 'here it is loss.advantage = "reinforce_pp_baseline"'),
    (["--loss.advantage", "False"], 'here it is loss.advantage = "dr_grpo"'),
    (["--loss.advantage", "gdpo"], "here it is nothing: not implemented here"),
    (["--loss.advantage", "ppo"], "here it is nothing: there are no critics"),
    (["--loss.aggregation", "token-mean"], 'here it is loss.aggregation = "token_mean"'),
    (["--loss.aggregation", "seq-mean-token-sum"], 'here it is loss.aggregation = "seq_mean_token_sum"\n'),
    (["--loss.aggregation", "Seq-Mean-Token-Sum-Norm"],
     'here it is loss.aggregation = "seq_mean_token_sum_norm"'),
    (["--loss.aggregation", "sequence_mean"], 'here it is loss.aggregation = "seq_mean_token_mean"'),
    (["--loss.aggregation", "bnpo"], 'here it is loss.aggregation = "token_mean"'),
    (["--loss.aggregation", "dr_grpo"],
     'here it is loss.aggregation = "seq_mean_token_sum_norm" with loss.horizon'),
    (["--loss.aggregation", "prompt_mean"], "here it is nothing: not implemented here"),
    (["--correction.preset", "tis"], 'here it is correction.preset = "token_tis"'),
    (["--correction.preset", "token_mask"],
     'here it is correction.preset = "icepop" with correction.lower = 0'),
    (["--correction.preset", "geometric"], 'here it is correction.preset = "geometric_mask"'),
    (["--correction.preset", "seq_mean_k1"], 'here it is correction.preset = "verl/decoupled_geo_rs"'),
    (["--correction.preset", "seq-mask-tis"], 'here it is correction.preset = "nemo/seq_mask_tis"'),
    (["--correction.preset", "decoupled_k3_rs"], 'here it is correction.preset = "verl/decoupled_k3_rs"'),
    (["--moe.replay", "r3"], 'here it is moe.replay = "R3"'),
    (["--correction.preset", "off"], 'here it is correction.preset = "none"'),
    (["--correction.preset", "sequence_mask"], 'here it is correction.preset = "sequence_mis"'),
    (["--precision.recipe", "fp8"],
     'here it is precision.recipe = "fp8_unified" (engine and learner) or "fp8_rollout"'),
    (["--precision.recipe", "bfloat16"], 'here it is precision.recipe = "bf16"'),
    (["--precision.compute_dtype", "bf16"], 'here it is precision.compute_dtype = "bfloat16"'),
    (["--optim.first_moment", "fp8"], 'here it is optim.first_moment = "float8"'),
    (["--rollout.kv_cache", "e4m3"], 'here it is rollout.kv_cache = "fp8"'),
    (["--train.remat", "true"], 'here it is train.remat = "layer"'),
    (["--learning_rate", "1e-6"], "optim.lr"), (["--learning-rate", "1e-6"], "optim.lr"),
    (["--learningRate=1"], "optim.lr"),
    (["--optim.learning-rate", "1e-6"], "is optim.lr here"),
    (["--rollout.lag", "1"], "rollout.max_staleness"),
    (["--max_head_offpolicyness", "1"], "rollout.max_staleness"),
    (["--rollout.max_staleness", "-1"], "must be at least 0"),
    (["--rollout.oversample", "0.5"], "must be at least 1"),
    (["--rollout.max_staleness", "1", "--rollout.lag", "1"], "is rollout.max_staleness here"),
    (["--optim.learningRate", "1e-6"], "is optim.lr here"),
    (["--rollout.maxNewTokens", "8"], '(did you mean "max_new_tokens"?)'),
    (["--loss.beta", "0.1"], "loss.kl_coef"), (["--beta", "0.1"], "loss.kl_coef"),
    (["--kl_coef", "0"], "belongs to loss.kl_coef"),
    (["--optim.beta", "0.9"], "optim.b1 and optim.b2"), (["--optim.epsilon", "1"], "optim.eps"),
    (["--epsilon", "1"], "loss.clip_low"), (["--epsilon_high", "0.28"], "loss.clip_high"),
    (["--rollout.n", "8"], "rollout.samples_per_prompt"),
    (["--num_generations", "8"], "rollout.samples_per_prompt"),
    (["--actor_rollout_ref.rollout.n", "8"], '"rollout.n" is rollout.samples_per_prompt here'),
    (["--grpo.num_prompts_per_step=8"], '"num_prompts_per_step" is rollout.prompts_per_step here'),
    (["--per_device_train_batch_size", "4"], "train.rows_per_microbatch"),
    (["--bf16", "true"], "precision.recipe"),
    (["--gradient_checkpointing"], "train.remat"),
    (["--max_completion_length", "9"], "rollout.max_new_tokens"),
    (["--n-samples-per-prompt", "8"], "rollout.samples_per_prompt"),
    (["--use_bias_correction_kl", "true"], 'loss.unbiased_kl with loss.sampled_by = "old"'),
    (["--delta", "3"], "is loss.dual_clip here"),
    (["--policy.optimizer.kwargs.lr", "1e-6"], "is optim.lr here"),
    (["--trainer.policy.optimizer_config.lr", "1e-6"], "is optim.lr here"),
    (["--generator.sampling_params.max_generate_length", "9"], "is rollout.max_new_tokens here"),
    (["--trainer.algorithm.off_policy_correction.tis_ratio_type", "token"], "is correction.preset here"),
])
def test_a_name_of_theirs_gets_ours(words, says, capsys):
    assert main.main(["train", "demo", *words]) == 2
    assert says in capsys.readouterr().err


def test_find_goes_by_whole_words_and_by_their_names():
    assert [s.name for s in find("lr")][:2] == ["optim.lr", "sft.lr"]
    assert all(re.search(r"(?<![a-z0-9])lr(?![a-z0-9])", f"{s.name} {s.kind} {s.description}".lower())
               for s in find("lr"))
    assert find("beta")[0].name == "loss.kl_coef" and {"loss.kl",
                                                       "loss.kl_coef"} <= {s.name for s in find("kl")}
    assert "optim.warmup_steps" in {s.name for s in find("warmu")}
    for words in (["learningRate"], ["--learning-rate"], ["learning", "rate"], ["learning rate"],
                  ["optim.lr"]):
        assert find(*words)[0].name == "optim.lr", words
    assert find("actor_rollout_ref.rollout.n")[0].name == "rollout.samples_per_prompt"
    assert {s.name for s in find("kl", "coef")} == {"loss.kl_coef", "loss.cov_kl_coef"}
    assert {s.name for s in find("rises", "lr")} == {"optim.warmup_steps"}
    with pytest.raises(ConfigError,
                       match=r"no setting matches 'num_generatons'(.|\n)*--find num_generations"):
        find("num_generatons")


def test_a_table_of_another_framework_is_told_apart(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[actor_rollout_ref.rollout]\nn = 8\n[data]\nmax_response_length = 9\n")
    assert main.main(["train", str(tmp_path / "a.toml")]) == 2
    said = capsys.readouterr().err
    assert ('a.toml:1: actor_rollout_ref: unknown section of other frameworks: "rollout.n" is '
            'rollout.samples_per_prompt') in said
    assert ('a.toml:3: data: unknown section of other frameworks: "max_response_length" is '
            'rollout.max_new_tokens here') in said


def test_the_table_speaks_of_settings_that_there_are_and_the_page_has_it():
    known = {s.name for s in settings()}
    said = [*KEYS, *(text for of in VALUES.values() for text in of.values())]
    found = {name for text in said for name in re.findall(r"[a-z]+\.[a-z_]+[a-z_0-9]*", text)}
    assert found - {"task.options"} <= known and VALUES.keys() <= known
    # none of them is two settings
    assert len(names()) == sum(len(theirs.split()) for theirs in KEYS.values())
    first = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
    sections = "|".join({name.split(".")[0] for name in known})
    cells = {name for cell in first for name in re.findall(rf"`\[*((?:{sections})\.[a-z_0-9]+)", cell)}
    assert cells - {"task.options"} <= known
    _, _, page = PAGE.partition("## By their names")
    assert [row for row in page.partition("## What they have")[0].splitlines()
            if row.startswith("| `")] == index(), (
        "python -m jaxfp8rl.other_names prints the rows"
    )


def test_a_value_that_stands_for_one_of_ours_is_one():
    """What a hint proposes can be set."""
    choices = {s.name: s.choices for s in settings()}
    for ours in VALUES.values():
        for text in ours.values():
            for key, value in re.findall(r'([a-z]+\.[a-z_]+) = "(\w+)"', text):
                assert not choices[key] or value in choices[key], text
            for preset in re.findall(r'correction\.preset = "([^"]+)"', text):
                assert preset in PRESETS, text


def test_names_are_those_of_the_other_tables_of_the_page():
    """What a row says that a name of theirs is, the hint says, too."""
    rows = [line.split("|") for line in PAGE.partition("## By their names")[0].splitlines()
            if line.startswith("| `")]
    for row in (row for row in rows if "." in row[1]):  # others are of presets
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", "".join(row[2:])):
            for ours in filter(None, [here(name)[:1]]):
                keys = re.findall(r"[a-z_]+\.([a-z_0-9]+)", ours[0])
                assert any(key in row[1]
                           for key in keys) or "[[task.rewards]]" in ours[0], (name, ours, row[1])
