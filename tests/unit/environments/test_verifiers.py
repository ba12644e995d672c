"""Environments written for `verifiers`, as they come. Those of the package itself need it: pip install
"jaxfp8rl[verifiers]" textarena nltk. NeMo Gym wants an older mcp, so it is in a folder of its own,
NEMO_GYM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_templates import tokenizer
from stand_in import published

from benchmarks.processes import child
from bridges.api import SamplingParams
from jaxfp8rl.data.environment_task import HASHES, EnvironmentTask
from jaxfp8rl.environments import verifiers_adapter
from jaxfp8rl.environments.player import Player
from jaxfp8rl.environments.pool import Pool
from jaxfp8rl.environments.registry import make_environment
from jaxfp8rl.environments.world import World
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.scored_groups import Prompt

installed = pytest.mark.skipif(not importlib.util.find_spec("verifiers"), reason="verifiers is not installed")
games = pytest.mark.skipif(not importlib.util.find_spec("textarena"), reason="textarena is not installed")
WORDS = "river stone bread house garden winter summer orange silver market bridge window letter forest " \
        "island cold cord word ward warm worm form farm firm fire hire wire ware warm light paper"


@pytest.mark.skipif(bool(importlib.util.find_spec("verifiers")), reason="verifiers is installed")
def test_a_missing_package_is_refused_by_name():
    with pytest.raises(ConfigError, match="verifiers is not installed") as e:
        make_environment("verifiers", {"env": {"taskset": {"id": "textarena"}}}, 0)
    assert e.value.next_step == 'pip install "jaxfp8rl[verifiers]"'


def test_another_series_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verifiers_adapter.importlib.metadata, "version", lambda name: "0.1.15")
    with pytest.raises(ConfigError, match="verifiers 0.1.15 drives a model in another way than 0.4"):
        make_environment("verifiers", {"env": {"taskset": {"id": "textarena"}}}, 0)


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The games take their words from a corpus of nltk's, of which this is a small one in the same form."""
    folder = tmp_path / "nltk" / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text(WORDS.replace(" ", "\n") + "\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))


def its_own(env: dict, seat: str, plays: list[tuple[dict, list[str]]]) -> list[float]:
    """The rewards that verifiers' own evaluation gives these tasks and turns, in a process of its own."""
    asked = json.dumps({"env": env, "seat": seat, "plays": plays})
    done = subprocess.run([sys.executable, Path(__file__).with_name("own_evaluation.py")], input=asked,
                          text=True,
                          env={**os.environ, **HASHES}, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def played(env: dict, says: list[list[str]]):
    """A trajectory of each task, whose turns are what is given -> (trajectories, problems, tokens)."""
    options = {"env": env, "size": len(says)}
    problems = EnvironmentTask("verifiers", options, chat=True).problems()
    t = tokenizer("Qwen2.5")
    replies = [[t.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts] for texts in says]
    pool = Pool(World("verifiers", options, 0, "", 60.0, 100_000, form="hermes"), workers=1, concurrency=4)
    found = []
    try:
        for problem, turns in zip(problems, replies):
            fake = published(t.vocab_size, 4, max_model_len=1 << 15, replies=turns, weights=1, version=0)
            prompt = Prompt(problem, tuple(t.apply_chat(problem.prompt)))
            how = SamplingParams(1 << 13, stop_token_ids=t.eos_token_ids)
            asked = scored_groups.make_requests([prompt], how, 1, 0, 1)
            found += Player(fake, pool, t, lambda request, c: c, len(turns)).generate(asked)[0]
    finally:
        pool.close()
    return found, problems, replies


GAMES = {  # the first wins; the second gets somewhere; the third makes no move that counts
    "Hangman-v0": [["[a]", "[r]", "[ware]"], ["[a]", "[e]", "[bread]", "[o]"], ["no move", "[x]"]],
    "WordLadder-v0": [["[word]", "[ward]", "[ware]", "[wire]", "[fire]"], ["[cord]"], ["[xxxx]"]],
    "WordSearch-v0": [["[4 1 4 6] [2 6 7 6]", "[0 0 3 0]", "[1 2 4 2]", "[1 5 4 5]"],
                      ["[4 2 4 7]", "[9 9 9 9]"],
                      ["no move", "no move"]],
}


@installed
@games
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.usefixtures("words")
def test_a_game_gives_the_reward_of_its_own_evaluation(game):
    """And what is trained on is what was sampled: turns that a limit of ours ends have the reward of
    verifiers' own."""
    env = {"taskset": {"id": "textarena", "game": game}}
    found, problems, replies = played(env, GAMES[game])
    used = [says[: len(c.turns)] for c, says in zip(found, GAMES[game])]
    for c, says, ids in zip(found, used, replies):
        assert c.end in ("done", "turns") and len(c.branches) == 1
        assert c.token_ids[c.sampled].tolist() == sum(ids[: len(says)], [])
    rewards = [sum(c.rewards) for c in found]
    assert rewards == its_own(env, "player", [(p.meta["task"], says) for p, says in zip(problems, used)])
    assert rewards[0] > 0 == rewards[2], rewards


def call(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


COUNTS = [["I count.\n" + call("increment_counter", count=1) + call("increment_counter", count=2),
           call("get_counter_value"), "It is 6."],
          [call("increment_counter", count=4), call("no_such_tool"), "It is 10."], ["I do not count."]]


@pytest.fixture
def counter(tmp_path):
    """The server of the NeMo Gym environment example_session_state_mgmt -> its address, and the rows it
    ships."""
    from verifiers.v1.tasksets import nemo_gym

    folder = os.environ["NEMO_GYM"]
    env = {**os.environ, "PYTHONPATH": folder, "NEMO_GYM_RESOURCE_SERVER":
           "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"}
    command = [sys.executable, Path(nemo_gym.__file__).with_name("server.py")]
    with child(command, cwd=tmp_path, env=env) as server:
        while not (port := tmp_path / "nemo_gym.port").exists() or not port.read_text():
            assert server.poll() is None
            time.sleep(0.2)
        time.sleep(2)
        data = f"{folder}/resources_servers/example_session_state_mgmt/data/example.jsonl"
        yield f"http://127.0.0.1:{port.read_text()}", data


@installed
@pytest.mark.skipif(not os.environ.get("NEMO_GYM"), reason="NEMO_GYM names no folder with nemo-gym")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tools_of_an_environment_are_called_as_in_its_own_evaluation(counter):
    url, rows = counter
    env = {"taskset": {"id": "nemo_gym", "dataset": rows, "task": {"resources_url": url}}}
    found, problems, replies = played(env, COUNTS)
    for c, says, ids in zip(found, COUNTS, replies):
        assert c.end == "done" and len(c.turns) == len(says), c.end
        assert c.token_ids[c.sampled].tolist() == sum(ids, [])
    whole = tokenizer("Qwen2.5").decode(found[0].token_ids, skip_special_tokens=False)
    assert whole.count("<tool_response>") == 3 and '{"count":6}' in whole
    assert "increment_counter" in tokenizer("Qwen2.5").decode(found[0].branches[0].prompt,
                                                              skip_special_tokens=False)
    assert [c.counts for c in found] == [{"tool_calls": 3, "malformed_calls": 0},
                                         {"tool_calls": 2, "malformed_calls": 0}, {}]
    rewards = [sum(c.rewards) for c in found]
    assert rewards == its_own(env, "agent", [(p.meta["task"], says) for p, says in zip(problems, COUNTS)])
    assert rewards == [1.0, 0.0, 0.0]
