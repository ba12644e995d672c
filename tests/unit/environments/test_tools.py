"""Tools: their schemas, calls as each family writes them, and what the model is told about those that are
wrong."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest
from chat_templates import FAMILIES, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.environments.calculator import calculator
from jaxfp8rl.environments.calls import FORMS, Call, Malformed, calls_in, form_of
from jaxfp8rl.environments.sqlite_tool import sqlite_tool
from jaxfp8rl.environments.tools import Toolbox, find_tool, schema_of
from jaxfp8rl.errors import ConfigError


def weather(city: str, days: int = 1, units: list[str] | None = None) -> str:
    """Forecast the weather
    of a city.

    city: its name
    """
    return f"{city} {days}"


async def later(n: int) -> int:
    """Wait."""
    return n + 1


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n"
                "<parameter=days>\n2\n</parameter>\n"
                "</function>\n</tool_call>",
    "llama": '{"name": "weather", "parameters": {"city": "Ulm", "days": 2}}',
    "gemma": "```tool_code\nweather(city='Ulm', days=2)\n```",
}
CALL = Call("weather", {"city": "Ulm", "days": 2})
MALFORMED = {
    "hermes": ["<tool_call>{", "<tool_call>{]</tool_call>", "<tool_call>[1]</tool_call>",
               '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
               "<tool_call>" + "[" * 5000 + "</tool_call>"],
    "qwen_xml": ["<tool_call><function=f>", "<tool_call>f()</tool_call>"],
    "llama": ['{"name": "f", "parameters": ', '{"name": 3}', '{"name": "f", "parameters": {}} and so on'],
    "gemma": ["```tool_code\nf(\n```", "```tool_code\nf(x=open('a'))\n```", "```tool_code\n1 + 1\n```",
              "```tool_code\n\n```"],
}


def test_a_schema_comes_from_the_signature():
    assert schema_of(weather) == {"type": "function", "function": {
        "name": "weather", "description": "Forecast the weather of a city.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "its name"}, "days": {"type": "integer", "default": 1},
            "units": {"anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                      "default": None}}}}}

    def untyped(x): ...

    def odd(x: sqlite3.Connection): ...

    for tool, words in ((untyped, "the parameter `x` has no type"), (odd, "JSON has no type for `x`")):
        with pytest.raises(ConfigError, match=words):
            schema_of(tool)


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_as_the_family_writes_them(form):
    written = WRITTEN[form]
    assert calls_in(written, form) == [CALL]
    two = f"{written}; {written}" if form == "llama" else f"First {written}\nthen {written}"
    assert calls_in(two, form) == [CALL, CALL]
    assert calls_in(f"<think>\n{written}\n</think>\n\n12", form, ("<think>", "</think>")) == []
    for text in ("12", "", "It is {x}.", "a < b"):
        assert calls_in(text, form) == []
    for text in MALFORMED[form]:
        found = calls_in(text, form)
        assert any(isinstance(call, Malformed) for call in found), text


@given(st.sampled_from(list(FORMS)), st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", ">", "{", "}", '"name"', ":", '"f"', "```tool_code\n",
     "```", "f(", ")",
     "\\", "\x00", "é", "[", "1", "\n", '{"name": "f", "parameters": {}}']), max_size=12))
def test_whatever_a_model_writes_is_read_without_an_exception(form, words):
    assert all(isinstance(call, Call | Malformed) for call in calls_in("".join(words), form))


def test_templates_of_the_families_say_their_form_and_write_tools():
    forms = {name: form_of(family.template) for name, family in FAMILIES.items()}
    assert forms == {"Qwen2.5": "hermes", "Qwen3": "hermes", "Llama 3": "llama", "Gemma": "gemma",
                     "Mistral": None}
    for name, form in forms.items():
        known = tokenizer(name).with_tools([schema_of(weather)])
        assert (known is not None) == (name in ("Qwen2.5", "Qwen3", "Llama 3")), form
        if known:
            assert "Forecast the weather" in known.render_chat([{"role": "user", "content": "?"}])
            assert "weather" not in tokenizer(name).render_chat([{"role": "user", "content": "?"}])


def answer(box: Toolbox, action: str):
    return asyncio.run(box.step(action))


def test_results_and_what_is_wrong_are_observations():
    box = Toolbox([weather, later, calculator], "hermes")
    as_json = lambda name, arguments: json.dumps({"name": name, "arguments": arguments})
    call = lambda name, **arguments: f"<tool_call>{as_json(name, arguments)}</tool_call>"
    said = lambda *calls: [m["content"] for m in answer(box, "".join(calls))[0]]
    assert answer(box, "It is 12.") == ("", 0.0, True, {})
    assert answer(box, call("weather", city="Ulm") + call("later", n=3)) == (
        [{"role": "tool", "content": "Ulm 1"}, {"role": "tool", "content": "4"}], 0.0, False,
        {"tool_calls": 2, "malformed_calls": 0})
    assert said(call("wether", city="Ulm")) == ['error: there is no tool "wether" (did you mean "weather"?)']
    assert "days: Input should be a valid integer" in said(call("weather", city="Ulm", days="two"))[0]
    assert said(call("weather")) == ["error: missing a required argument: 'city'"]
    assert said(call("weather", city="Ulm", x=1)) == ["error: got an unexpected keyword argument 'x'"]
    assert said(call("calculator", expression="1/0")) == ["error: ZeroDivisionError: division by zero"]
    assert answer(box, "<tool_call>{")[3] == {"tool_calls": 1, "malformed_calls": 1}
    [message] = answer(Toolbox([weather], "gemma"), "```tool_code\nweather('Ulm')\n```")[0]
    assert message == {"role": "user", "content": "```tool_output\nUlm 1\n```"}


def test_the_calculator_reads_and_never_runs():
    assert [calculator(x) for x in ("(3+4)*12", "7/2", "2**10", "2^10", "-3 % 5", "4/2", "10//3")] == [
        "84", "3.5", "1024", "1024", "2", "2", "3"]
    for text in ("__import__('os')", "9**9**9", "1" * 300, "(1).real", "True", "1e308*10", "(-8)**0.5", "3 +",
                 "(" * 150 + ")" * 150):
        with pytest.raises((ValueError, ArithmeticError)):
            calculator(text)


def test_a_database_is_read_and_never_written(tmp_path):
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as db:
        db.executescript("create table goods (name, price); insert into goods values ('tea', 3), ('milk', 2)")
    before, query = file.read_bytes(), sqlite_tool(str(file))
    assert query("select name, price from goods order by price") == "name | price\nmilk | 2\ntea | 3"
    long = query("with recursive n(i) as (select 1 union all select i + 1 from n where i < 100) "
                 "select i from n")
    assert long.endswith("50\n...")
    for wrong in ("drop table goods", "insert into goods values (1, 2)", f"attach '{tmp_path}/x.db' as x",
                  "pragma query_only", "select load_extension('x')", "select 1; select 2", "select",
                  "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"):
        with pytest.raises((sqlite3.Error, sqlite3.Warning)):
            query(wrong)
    assert file.read_bytes() == before and not (tmp_path / "x.db").exists()
    with pytest.raises(ConfigError, match="no such file"):
        find_tool(f"sqlite:{tmp_path}/none.db")
    with pytest.raises(ConfigError, match="cannot be read: file is not a database"):
        find_tool(f"sqlite:{__file__}")


@pytest.mark.parametrize(("name", "words"), [
    ("calcluator", 'did you mean "calculator"'), ("json:loadz", "has no class or function"),
    ("no_such_package:f", "No module named"), ("math:pi", "is not a function but float"),
    ("datetime:date", "is not a function but type")])
def test_a_tool_that_is_none_is_refused_by_name(name, words):
    with pytest.raises(ConfigError) as e:
        find_tool(name)
    assert words in str(e.value) and "environment.tools" in str(e.value)
