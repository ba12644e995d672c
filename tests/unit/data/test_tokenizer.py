"""Tokenizers: the character one, HF folders, chat templates against transformers, and what a broken folder
says."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.data.tokenizer import check_fits, load_tokenizer
from jaxfp8rl.errors import ConfigError, DataError, ModelError
from jaxfp8rl.training.warm_start import _example

CHARS = "0123456789+-*= "
MESSAGES = [{"role": "system", "content": "S <é>"}, {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"}, {"role": "user", "content": 'say "x"'}]
TEMPLATE = """\
{%- set ns = namespace(n=0) %}
{{ bos_token }}
{% for m in messages %}
    {% if m.role == "tool" %}{{ raise_exception("no tools here") }}{% endif %}
    {% if m.role == "system" and not loop.first %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
<|{{ m['role'] }}|>{% generation %}{{ m.content | tojson }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{{ ns.n }}{% if tools is none %} no tools{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE in the form transformers saves: BOS by post-processor, special tokens as objects,
    truncation on."""
    path = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(["one plus one is two", "say hello"] * 3, vocab_size=300, show_progress=False,
                                special_tokens=["<s>", "</s>", "<|end|>"])
    backend._tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast",
              "bos_token": {"content": "<s>", "__type": "AddedToken"},
              "eos_token": "</s>", "chat_template": "ignored: the file comes first"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@given(st.text(CHARS, max_size=50))
def test_chars_round_trip(text):
    tokenizer = load_tokenizer("chars:" + CHARS)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and set(ids) <= set(range(2, 17))
    assert tokenizer.decode([*ids, *tokenizer.eos_token_ids, tokenizer.pad_token_id]) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_byte_level_round_trip_without_truncation_or_padding(folder, text):
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and ids[1:] == tokenizer.encode(text, add_special_tokens=False)
    if not any(special in text for special in ("<s>", "</s>", "<|end|>")):
        assert tokenizer.decode(ids) == text


def test_special_ids(folder):
    chars, bpe = load_tokenizer("chars:01"), load_tokenizer(str(folder))
    assert (chars.eos_token_ids, chars.pad_token_id, chars.vocab_size) == ((1,), 0, 4)
    # its own first, though generation_config.json says 2, 1
    assert (bpe.eos_token_ids, bpe.pad_token_id) == ((1, 2), 1)
    assert bpe.vocab_size == 3 + 256 + len(bpe._backend.get_vocab()) - 259


def test_the_warm_start_ends_a_turn_as_the_tokenizer_does_and_never_in_mid_sentence(folder):
    tokenizer = load_tokenizer(str(folder))
    answer = tokenizer.encode("one plus one is two", add_special_tokens=False)
    assert len(answer) > 2
    for longest, completion in ((len(answer) + 1, [*answer, 1]), (len(answer), answer), (2, answer[:2])):
        assert list(_example([0], "one plus one is two", tokenizer, longest).completion) == completion


def test_decode_shows_what_it_cannot_decode():
    tokenizer = load_tokenizer("chars:01")
    assert tokenizer.decode([2, 99, 99, 3]) == "0\ufffd\ufffd1"
    assert tokenizer.decode([2, 0, 3], skip_special_tokens=False) == "0<pad>1"


def test_unknown_characters_are_named():
    with pytest.raises(DataError, match="the vocabulary lacks 'a', 'é'"):
        load_tokenizer("chars:" + CHARS).encode("1éa")


def test_fingerprint_follows_the_vocabulary():
    prints = [load_tokenizer(spec).fingerprint()
              for spec in ("chars:01", "chars:01", "chars:10", "chars:012")]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_check_fits():
    tokenizer = load_tokenizer("chars:01")
    check_fits(tokenizer, 4)
    with pytest.raises(ModelError, match="largest id is 3, the model's vocabulary has 3"):
        check_fits(tokenizer, 3)


@pytest.mark.parametrize("which", ["chars", "folder"])
def test_a_saved_folder_is_read_back_and_by_transformers(which, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer("chars:" + CHARS if which == "chars" else str(folder))
    ours.save(str(tmp_path))
    again, theirs = load_tokenizer(str(tmp_path)), transformers.PreTrainedTokenizerFast.from_pretrained(
        tmp_path)
    for text in ("12+7=19", " 1 ", "0"):
        assert again.encode(text) == ours.encode(text) == theirs(text)["input_ids"]
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == ours.decode(ours.encode(text))
    assert (again.fingerprint(), again.eos_token_ids) == (ours.fingerprint(), ours.eos_token_ids)
    assert theirs.eos_token_id in ours.eos_token_ids


def test_a_chat_template_that_asks_for_today_is_told_the_same_day_whatever_day_it_is(folder, tmp_path):
    folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    (folder / "chat_template.jinja").write_text("Today Date: {{ strftime_now('%d %b %Y') }}")
    assert load_tokenizer(str(folder)).render_chat(MESSAGES) == "Today Date: 26 Jul 2024"
    assert load_tokenizer(str(folder), "2026-01-31").render_chat(MESSAGES) == "Today Date: 31 Jan 2026"


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_template_renders_as_in_transformers(folder, tmp_path, generation_prompt):
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(str(folder))
    ours.save(str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation_prompt)
    assert ours.render_chat(MESSAGES, generation_prompt) == expected
    assert '<|system|>"S <é>"</s>' in expected and "4 no tools" in expected
    if generation_prompt:
        assert ours.apply_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)[
            "input_ids"]


def test_chat_templates_that_refuse_or_are_missing_or_reach_out(folder):
    with pytest.raises(DataError, match="refused the messages: no tools here"):
        load_tokenizer(str(folder)).apply_chat([{"role": "tool", "content": ""}])
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer("chars:01").apply_chat(MESSAGES)


@pytest.mark.parametrize(("template", "error", "words"), [
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", DataError, "unsafe"),
    ("{{ 'x' + messages[0].name }}", DataError, "refused the messages"),  # UndefinedError
    ("{{ 'x' + none }}", DataError, "refused the messages"),  # TypeError: a content that is null
    ("{% for m in messages %}", ModelError, "the chat template is damaged"),
])
def test_whatever_a_chat_template_raises_is_an_error_of_the_users(folder, tmp_path, template, error, words):
    folder = shutil.copytree(folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(error, match=words):
        load_tokenizer(str(folder)).apply_chat(MESSAGES)


TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place, in \u00b0C & <now>.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}]
SAID = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
THINKS = "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
# (template, variables): written after those of Qwen3, Llama 3.1 and 3.2, gpt-oss, DeepSeek V3.1
TEMPLATES = [
    (SAID + THINKS, {"enable_thinking": False}), (SAID + THINKS, {"enable_thinking": True}),
    ("{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
     + SAID,
     {"date_string": "01 Jan 2026"}),
    ("{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
     "strftime_now('%d %b %Y') %}{% endif %}{% endif %}{{ date_string }}{% if not tools_in_user_message is "
     "defined %}?{% endif %}"
     + SAID, {}),
    ("{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n"
     "{{ t | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}{% endif %}" + SAID,
     {"tools": TOOLS}),
    ("Reasoning: {{ reasoning_effort }} {{ strftime_now('%Y-%m-%d') }} {{ bos_token }}" + SAID,
     {"reasoning_effort": "high"}),
    ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% macro end() %}{{ suffix "
     "}}{% endmacro %}" + SAID +
     "{{ '<think>' if thinking else '</think>' }}{{ end() }}{% for d in documents or [] %}{{ "
     "d.title }}{% endfor %}",
     {"thinking": True, "suffix": "!", "documents": [{"title": "T", "text": "x"}], "bos_token": "<own>"}),
]


@pytest.mark.parametrize(("template", "variables"), TEMPLATES)
def test_template_variables_render_as_in_transformers(folder, tmp_path, template, variables):
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template
                                                + ("{{ bos_token }}" if "bos_token" in variables else ""))
    ours = load_tokenizer(str(folder), datetime.date.today().isoformat(), variables)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("files", [False, True])
def test_tools_take_the_template_for_tools_as_in_transformers(folder, tmp_path, files):
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(folder, tmp_path / "copy")
    named = {"default": "plain" + SAID, "tool_use": "{{ tools | tojson }}" + SAID}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    else:
        (folder / "chat_template.jinja").unlink()
        config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    load_tokenizer(str(folder)).save(str(tmp_path / "saved"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for place in (folder, tmp_path / "saved"):
        for variables in ({}, {"tools": TOOLS}):
            want = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True,
                                              **variables)
            assert load_tokenizer(str(place), template_kwargs=variables).render_chat(MESSAGES) == want


@pytest.mark.parametrize(("variables", "words"), [
    ({"enable_thinkin": False}, 'chat template reads no such variable (did you mean "enable_thinking"?)'),
    ({"date_string": "today"}, "task.date sets the date of strftime_now"),
    ({"reasoning_effort": "low"}, "(known: enable_thinking, tools)"),
    ({"add_generation_prompt": False}, "set by the run itself"), ({"messages": []}, "set by the run itself"),
    ({"tools": "get_weather"}, "tools: must be a list of tables"),
])
def test_a_variable_that_no_template_reads_is_refused(folder, tmp_path, variables, words):
    folder = shutil.copytree(folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{% set now = strftime_now('%Y') %}{{ now }}{{ tools }}{{ enable_thinking }}{{ bos_token }}" + SAID)
    with pytest.raises(ConfigError) as e:
        load_tokenizer(str(folder), template_kwargs=variables)
    assert "task.chat_template_kwargs." in str(e.value) and words in str(e.value)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer("chars:01", template_kwargs=variables)


def test_a_template_is_compiled_once(folder, monkeypatch):
    """Rendering N prompts must not compile N times: 14 ms a prompt."""
    compiled, compile_ = [], jinja2.Environment.compile
    monkeypatch.setattr(jinja2.Environment, "compile",
                        lambda *args, **kw: compiled.append(1) or compile_(*args, **kw))
    tokenizer = load_tokenizer(str(folder))
    assert len({tokenizer.render_chat([{"role": "user", "content": str(i)}]) for i in range(20)}) == 20
    assert len(compiled) == 1


@pytest.mark.parametrize(("files", "words"), [
    ({}, "no tokenizer.json"),
    ({"tokenizer.json": "{"}, "tokenizer.json is damaged"),
    ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json is damaged"),
    ({"tokenizer.json": None}, "no end-of-sequence token"),
    ({"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "<gone>"}'},
     "no end-of-sequence token"),
])
def test_a_broken_folder_names_the_file(folder, tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text((folder / name).read_text() if text is None else text)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("spec", ["chars:", "chars:00"])
def test_bad_character_sets(spec):
    with pytest.raises(ModelError, match="name each character once"):
        load_tokenizer(spec)
