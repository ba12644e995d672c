"""A dumped config holds every field and loads back."""

from __future__ import annotations

import string

import pytest
from config_files import GOOD
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.config.schema import SECTIONS, Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import ConfigError

# --- dump


def test_dump_holds_every_field_and_loads_back(write):
    cfg = load_config(write(GOOD))
    text = dump_config(cfg)
    for section, model in SECTIONS.items():
        assert f"[{section}]" in text
        for key in model.model_fields:
            assert f"\n{key} = " in text or f"\n# {key} = " in text or f"\n[{section}.{key}]\n" in text
    assert load_config(write(text)) == cfg


words = st.text(max_size=12)
values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | words | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@given(
    tables=st.dictionaries(words, values, max_size=4),
    text=words,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    trackers=st.sampled_from([(), ("tensorboard",)]),
)
def test_dump_round_trip(tmp_path_factory, tables, text, lr, trackers):
    base = tmp_path_factory.mktemp("dump") / "a.toml"
    base.write_text(GOOD)
    data = load_config(str(base)).model_dump()
    data["task"] |= {"options": tables, "system_prompt": text}
    data["optim"]["lr"] = lr
    data["run"]["trackers"] = trackers
    cfg = Config.model_validate(data)
    base.write_text(dump_config(cfg), encoding="utf-8", newline="")
    assert load_config(str(base)) == cfg


def test_null_has_no_toml(write):
    data = load_config(write(GOOD)).model_dump()
    data["model"]["config"]["rope_scaling"] = None
    with pytest.raises(ConfigError, match="no form in TOML"):
        dump_config(Config.model_validate(data))


@given(st.text(string.printable, max_size=60))
def test_no_text_crashes(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("noise") / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(path))
