"""What ends a completion: the end of a turn in real chat templates, stop tokens, stop strings."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import Completion, GenRequest, SamplingParams, VersionSpan
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.stops import stops_of
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.warm_start import _example

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = ("{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
          "{{ m.content | trim }}<|eot_id|>{% endfor %}")
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' "
    "else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
PHI3 = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}")
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ "
    "m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}")
GLM4 = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
NO_ASSISTANT = "{% for m in messages if m.role != 'user' %}{{ raise_exception('users alone') }}{% endfor %}"
TEMPLATES = {  # template, eos, other added tokens, what ends a turn
    "Qwen2.5 base": (CHATML, "<|endoftext|>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "Qwen2.5 instruct": (CHATML, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|end_of_text|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
                "<|eot_id|>"),
    "Gemma": (GEMMA, "<eos>", ("<bos>", "\n", "\n\n", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "Mistral": (MISTRAL, "</s>", ("<s>", "[INST]", "[/INST]"), "</s>"),
    "Phi-3": (PHI3, "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "DeepSeek": (DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>"), "<｜end▁of▁sentence｜>"),
    "GLM-4": (GLM4, "<|endoftext|>", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), "<|user|>"),
    "plain text": (PLAIN, "</s>", (), None),
    "ChatML in words alone": (CHATML, "</s>", (), None),
    "refuses an assistant": (NO_ASSISTANT, "</s>", (), None),
}


def folder(path, template: str, eos: str, added: tuple[str, ...] = ()):
    """A byte-level BPE as Hugging Face has it."""
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(["what is the answer </answer> of it"] * 3, vocab_size=300,
                                show_progress=False)
    backend._tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False)
                                           for t in (eos, *added)])
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": eos, "bos_token": next((t for t in added if t in ("<s>", "<bos>")), None),
              "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def rollout(**settings) -> Rollout:
    return Rollout(prompts_per_step=1, samples_per_prompt=1, max_new_tokens=64, **settings)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_read_off_the_chat_template(name, tmp_path):
    """It is the first of the stops: a demonstration ends with it. What eos does not name is said, and an end
    without a token."""
    template, eos, added, end = TEMPLATES[name]
    tokenizer = load_tokenizer(str(folder(tmp_path, template, eos, added)))
    stops = stops_of(rollout(), tokenizer, chat=True)
    said = [tokenizer.decode([i], skip_special_tokens=False) for i in stops.token_ids]
    assert said == list(dict.fromkeys(filter(None, (end, eos))))
    assert stops.tokenizer.decode(_example([5], "it", stops.tokenizer, 64).completion,
                                  False) == f"it{said[0]}"
    if end == eos:
        assert not stops.notes
    elif end:
        (note,) = stops.notes
        assert f"{end!r} ({stops.token_ids[0]})" in note and f"{eos!r}" in note
    else:
        assert len(stops.notes) == 1 and "rollout.stop_token_ids or rollout.stop" in stops.notes[0]
    # a prompt of plain text has no turns
    assert stops_of(rollout(), tokenizer, chat=False).token_ids == tokenizer.eos_token_ids


def test_stop_tokens_are_ids_or_words_and_an_ordinary_word_stays_in_the_text(tmp_path):
    tokenizer = load_tokenizer(str(folder(tmp_path, CHATML, "<|endoftext|>", ("<|im_start|>", "<|im_end|>"))))
    answer, end = tokenizer.encode(" answer"), tokenizer.added_tokens()["<|im_end|>"]
    assert len(answer) == 1
    stops = stops_of(rollout(stop_token_ids=("<|im_end|>", answer[0], " answer")), tokenizer, chat=False)
    assert stops.token_ids == (*tokenizer.eos_token_ids, end, answer[0]) and not stops.notes
    text = lambda *ids: stops.tokenizer.completion_text([*tokenizer.encode("is"), *ids])
    assert (text(*answer), text(end), text(*tokenizer.eos_token_ids), text(end, *answer)) == (
        "is answer", "is", "is", "is<|im_end|> answer")
    wrongs = {10**6: "there is no token 1000000", -1: "there is no token -1",
              "no such": r"rollout.stop = \['no such'\]"}
    for wrong, said in wrongs.items():
        with pytest.raises(ConfigError, match=said):
            stops_of(rollout(stop_token_ids=(wrong,)), tokenizer, chat=False)


def test_a_stop_token_with_a_character_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"stop_token_ids: 'zz' is not a token of the tokenizer"):
        stops_of(rollout(stop_token_ids=("zz",)), load_tokenizer("chars:0123456789+-*="), chat=False)


def completion(ids: list[int], prompt: int, finish: str = "length") -> tuple[GenRequest, Completion]:
    n, request = len(ids), GenRequest("r", tuple(range(2, 2 + prompt)), SamplingParams(64))
    routes = np.arange((prompt + n - 1) * 2).reshape(-1, 1, 2)
    spans = VersionSpan(0, n // 2, 1), VersionSpan(n // 2, n, 2)
    return request, Completion("r", 0, np.array(ids, np.int32), -np.arange(n, dtype=np.float32), finish,
                               spans, routes)


@given(st.text("ab", min_size=2, max_size=40),
       st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=2))
def test_of_a_token_a_character_the_text_ends_where_str_find_says(text, strings):
    """And everything that is by token ends with it."""
    tokenizer = load_tokenizer("chars:ab")
    stops = stops_of(rollout(stop=tuple(strings)), tokenizer, chat=False)
    request, whole = completion(tokenizer.encode(text), prompt=3)
    cut = stops.cut(request, whole)
    ends = [text.find(s) + len(s) for s in strings if s in text]
    n = min(ends, default=len(text))
    assert tokenizer.decode(cut.token_ids) == text[:n] and cut.finish_reason == ("stop" if ends else "length")
    assert len(cut.logprobs) == n and cut.logprobs[-1] == whole.logprobs[n - 1] and len(
        cut.routed_experts) == 3 + n - 1
    assert sum(s.stop - s.start
               for s in cut.version_spans) == n and all(s.stop > s.start for s in cut.version_spans)
    assert {i for i in tokenizer.encode("ab")
            if tokenizer.decode([i]) in strings} == set(stops.token_ids) - {0, 1}


@given(st.text(alphabet="wha is</>newrofté€", max_size=30),
       st.text(alphabet="wha is</>newroftv", max_size=20))
def test_a_stop_string_of_several_tokens_ends_with_the_token_that_completes_it(
        tmp_path_factory, before, behind):
    tokenizer = bpe(tmp_path_factory)
    stops = stops_of(rollout(stop=("</answer>",)), tokenizer, chat=False)
    request, whole = completion(tokenizer.encode(f"{before}</answer>{behind}"), prompt=2)
    cut = stops.cut(request, whole)
    ids = cut.token_ids.tolist()
    assert "</answer>" in tokenizer.decode(ids) and "</answer>" not in tokenizer.decode(ids[:-1])
    assert ids == whole.token_ids.tolist()[: len(ids)]


def bpe(tmp_path_factory):
    if not hasattr(bpe, "made"):
        bpe.made = load_tokenizer(str(folder(tmp_path_factory.mktemp("bpe"), CHATML, "</s>")))
    return bpe.made


def test_an_engine_stops_at_once_at_tokens_that_have_the_string_in_them(tmp_path):
    tokenizer = load_tokenizer(str(folder(tmp_path, CHATML, "</s>")))
    stops = stops_of(rollout(stop=("swer", "\n")), tokenizer, chat=False)
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in stops.token_ids}
    assert texts >= {"</s>", "\n", " answer"} and all("swer" in t or "\n" in t or t == "</s>" for t in texts)
    request, whole = completion(tokenizer.encode("what is"), prompt=2)
    assert stops.cut(request, whole) is whole
    free = stops_of(rollout(), tokenizer, chat=False)
    assert free.token_ids == tokenizer.eos_token_ids and free.cut(request, whole) is whole


def test_a_batch_is_scored_and_learned_from_up_to_its_stops():
    """Through the run's own context: the engine stops at tokens, the string of two is found behind it."""
    cfg = load_config("demo", ["--rollout.stop", '["*", "7+"]', "--rollout.stop_token_ids", '["9"]'])
    with contextlib.closing(build_run(cfg)) as ctx:
        encode = ctx.tokenizer.encode
        said = ["12*34", "1947", "17+50", "23"]
        engine = FakeEngine(ctx.model.vocab_size, replies=[encode(text) for text in said])
        engine.commit(0, "")
        prompts, sampling = ctx.held_out[:2], dataclasses.replace(ctx.sampling, max_tokens=5)
        assert set(ctx.greedy.stop_token_ids) == set(sampling.stop_token_ids) == {1, *encode("*9")}
        requests = scored_groups.make_requests(prompts, sampling, 2, 0, 1)
        kept, _ = scored_groups.generate(engine, prompts, requests, 0, cut=ctx.stops.cut)
        groups = scored_groups.score(kept, ctx.tokenizer, ctx.rewards)
        assert [text for g in groups for text in g.texts] == ["12*", "19", "17+", "23"]
        assert [c.finish_reason for g in groups for c in g.completions] == ["stop", "stop", "stop", "length"]
        samples = sum(scored_groups.to_samples(groups, ctx.cfg.loss, 5), [])
        assert [list(s.completion) for s in samples] == [encode(text) for text in ("12*", "19", "17+", "23")]
        assert all(len(s.completion) == len(s.logprobs) for s in samples)
