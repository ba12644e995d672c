"""Names of other frameworks: a hint wherever one is typed, found by `config --find`, and on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxfp8rl import cli
from jaxfp8rl.other_names import KEYS, VALUES, here
from jaxfp8rl.settings import find, settings

PAGE = Path("docs/coming_from.md").read_text()


@pytest.mark.parametrize("words, says", [
    (["--loss.objective", "grpo"], 'loss.objective = "ppo_clip" with loss.advantage = "grpo"'),
    (["--loss.objective", "dapo"], 'loss.objective = "ppo_clip" with loss.clip_high = 0.28'),
    (["--learning_rate", "1e-6"], "optim.lr"),
    (["--learning-rate", "1e-6"], "optim.lr"),
    (["--loss.beta", "0.1"], "loss.kl_coef"),
    (["--beta", "0.1"], "loss.kl_coef"),
    (["--optim.beta", "0.9"], "known: b1, b2"),
    (["--rollout.n", "8"], "rollout.samples_per_prompt"),
])  # fmt: skip
def test_a_name_of_theirs_gets_ours(words, says, capsys):
    assert cli.main(["train", "demo", *words]) == 2
    assert says in capsys.readouterr().err


def test_find_goes_by_whole_words_and_by_their_names():
    assert [s.name for s in find("lr")][:2] == ["optim.lr", "sft.lr"]
    assert all(re.search(r"(?<![a-z0-9])lr(?![a-z0-9])", f"{s.name} {s.kind} {s.description}".lower()) for s in find("lr"))
    assert find("beta")[0].name == "loss.kl_coef" and {"loss.kl", "loss.kl_coef"} <= {s.name for s in find("kl")}
    assert "optim.warmup_steps" in {s.name for s in find("warmu")}


def test_the_table_speaks_of_settings_that_there_are_and_the_page_has_it():
    known = {s.name for s in settings()}
    said = [text for word in [*KEYS, *(v for of in VALUES.values() for v in of)] for text in here(word)]
    assert {name for text in said for name in re.findall(r"[a-z]+\.[a-z_]+", text)} <= known and VALUES.keys() <= known
    words = set(re.findall(r"\w+", PAGE.replace("--", "").replace("-", "_")))
    assert [key for key in KEYS if key not in words] == []
    first = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
    sections = "|".join({name.split(".")[0] for name in known})
    assert {name for cell in first for name in re.findall(rf"`\[*((?:{sections})\.[a-z_0-9]+)", cell)} <= known
