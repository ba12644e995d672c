"""Tokens stay tokens: what is trained on is what was sampled, whatever a template does with the history."""

from __future__ import annotations

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bridges.api import Completion, VersionSpan
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.environments.conversation import Conversation
from jaxfp8rl.errors import DataError

QUESTION = ({"role": "user", "content": "How much is it?"},)
WORDS = st.sampled_from(["7", " so", "\n", "\n\n", " ", "the answer", "<think>", "</think>", "<tool_call>",
                         "é", "[", "  "])


def completion(ids, version: int = 0) -> Completion:
    n = len(ids)
    return Completion("0/0", 0, np.asarray(ids, np.int32), np.full(n, -0.5, np.float32), "stop",
                      (VersionSpan(0, n, version),))


def talk(name: str, prompt=QUESTION) -> Conversation:
    t = tokenizer(name)
    return Conversation(t, prompt, t.apply_chat(prompt))


def ids(name: str, text: str) -> list[int]:
    return tokenizer(name).encode(text, add_special_tokens=False)


@st.composite
def plays(draw):
    """(family, turns, observations): turns are tokens that need not be a tokenizer's own choice."""
    name = draw(st.sampled_from(list(FAMILIES)))
    t, family = tokenizer(name), FAMILIES[name]
    anything = st.integers(0, t.vocab_size - 1)
    turns, observations = [], []
    for _ in range(draw(st.integers(1, 4))):
        words = draw(st.one_of(st.lists(anything, min_size=1, max_size=8),
                               st.lists(WORDS, min_size=1, max_size=5).map(lambda w: ids(name, "".join(w)))))
        end = draw(st.sampled_from([*t.eos_token_ids, None]))
        turns.append([*(i for i in words if i not in t.eos_token_ids), *([] if end is None else [end])]
                     or [0])
        role = draw(st.sampled_from(["user", "tool"] if family.tool else ["user"]))
        observations.append([{"role": role, "content": draw(st.lists(WORDS, max_size=4).map("".join))}])
    return name, turns, observations


@settings(max_examples=60, deadline=None)
@given(plays())
def test_what_is_trained_on_is_what_was_sampled(play):
    round_trip(play)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(plays())
def test_it_is_so_over_ten_thousand_trajectories(play):
    round_trip(play)


def round_trip(play):
    """Every turn's tokens are in one branch, in order; every prompt of a turn is the exact tokens before
    it."""
    name, turns, observations = play
    c, asked = talk(name), []
    for turn, observation in zip(turns, observations):
        asked.append(c.context)
        c.said(completion(turn))
        assert c.context == (*asked[-1], *turn)
        c.heard(observation)
    branches = c.branches()
    trained = np.concatenate([b.token_ids[b.sampled] for b in branches])
    np.testing.assert_array_equal(trained, np.concatenate([np.asarray(t) for t in turns]))
    seen = iter(asked)
    for b in branches:
        whole, at = (*b.prompt, *b.token_ids.tolist()), len(b.prompt)
        for s in b.segments:
            if s.completion is not None:
                assert whole[:at] == next(seen)
            at += len(s.token_ids)
    assert next(seen, None) is None


@settings(max_examples=40, deadline=None)
@given(plays())
def test_the_engine_reads_what_the_template_writes(play):
    """But for white space around a turn, and the token that ended it."""
    name, turns, observations = play
    t, c, messages = tokenizer(name), talk(name), list(QUESTION)
    for turn, observation in zip(turns, observations):
        text = c.said(completion(turn))
        messages += [{"role": "assistant", "content": text}, *observation]
        c.heard(observation)
        bare = lambda x: "".join(x.split())
        found, want = bare(t.decode(c.context, skip_special_tokens=False)), bare(t.render_chat(messages))
        for end in FAMILIES[name].ends:
            found, want = found.replace(end, ""), want.replace(end, "")
        assert found == want


def test_a_turn_that_was_encoded_otherwise_is_not_encoded_again():
    c, turn = talk("Qwen2.5"), [*ids("Qwen2.5", "t"), *ids("Qwen2.5", "h"), *ids("Qwen2.5", "e"),
                                *ids("Qwen2.5", "<|im_end|>")]
    assert len(ids("Qwen2.5", "the")) == 1
    c.said(completion(turn))
    c.heard("more")
    assert c.context[-len(c.context) + len(talk("Qwen2.5").context):][: len(turn)] == tuple(turn)
    [branch] = c.branches()
    assert branch.token_ids.tolist() == turn


def test_a_cut_turn_is_ended_by_the_template_and_a_stop_of_another_kind_stays():
    for name, end in (("Llama 3", []), ("Llama 3", ["<|eom_id|>"]), ("Llama 3", ["<|eot_id|>"])):
        c = talk(name)
        c.said(completion([*ids(name, "12"), *(i for e in end for i in ids(name, e))]))
        c.heard([{"role": "tool", "content": "7"}])
        text = tokenizer(name).decode(c.context, skip_special_tokens=False)
        assert f"12{end[0] if end else '<|eot_id|>'}<|start_header_id|>ipython" in text


def test_a_template_that_drops_thoughts_begins_a_branch_and_a_tool_result_does_not():
    think = ids("Qwen3", "<think>\nso\n</think>\n\n7<|im_end|>")
    c = talk("Qwen3")
    c.said(completion(think))
    c.heard([{"role": "tool", "content": "12"}])
    c.said(completion(think))
    assert len(c.branches()) == 1
    c.heard("And now?")
    c.said(completion(think))
    first, second = c.branches()
    assert first.sampled.sum() == 2 * len(think) and second.sampled.sum() == len(think)
    text = tokenizer("Qwen3").decode(second.prompt, skip_special_tokens=False)
    assert "<think>" not in text and "And now?" in text and text.endswith("assistant\n")


def test_a_refused_observation_is_an_error_that_names_the_template():
    c = talk("Gemma")
    c.said(completion(ids("Gemma", "7<end_of_turn>")))
    with pytest.raises(DataError, match="only user and assistant"):
        c.heard([{"role": "tool", "content": "12"}])


def test_plain_text_goes_on_without_a_template():
    t = load_tokenizer("chars:?123+-")
    c = Conversation(t, "?", t.encode("?"))
    assert c.said(completion(t.encode("2"))) == "2"
    c.heard("+")
    c.said(completion([*t.encode("3"), 1]))
    [branch] = c.branches()
    assert branch.token_ids.tolist() == [*t.encode("2+3"), 1] and branch.sampled.tolist() == [True, False,
                                                                                              True, True]
    assert branch.prompt == tuple(t.encode("?"))
    with pytest.raises(DataError, match="cannot encode"):
        c.heard("x")
