"""Row 13: broken datasets, each refused with file, line and field, or counted; and whatever bytes the readers
are given."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bridges.api import BridgeError, ParamMeta
from bridges.proof.byte_digest import host_digest
from bridges.sources.array_source import ArraySource
from bridges.transports.safetensors_file import write_folder
from bridges.vllm_plugin import paths, pieces
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.rows import read_rows
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.errors import DataError, UserError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.problems import load_data

GOOD = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
DEEP = "[" * 100_000
CHAT = '{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}\n'

# (the second line of a JSONL file, what is said of it)
ROWS = [
    ('{"prompt": "x", "answer": "1"', "malformed JSON"),
    ("{prompt: 1}", "malformed JSON: Expecting property name enclosed in double quotes at column 2 of 11"),
    ("", "blank line"), ("  \t", "blank"),
    ('{"prompt": "x", "answer": "1"} trailing', "malformed JSON"), ("null", "but is null"),
    ("[]", "but is a list"),
    ('"text"', "but is a string"), ("7", "but is a number"), ("true", "but is a boolean"),
    ("{}", 'field "prompt": missing'),
    ('{"Prompt": "x", "answer": "1"}', 'did you mean "Prompt"'),
    ('{"prompt": "x", "anwser": "1"}', 'did you mean "anwser"'),
    ('{"prompt": "x", "answer": null}', 'field "answer"'), ('{"prompt": "x", "answer": NaN}', "but is nan"),
    ('{"prompt": "x", "answer": []}', "an empty list"),
    ('{"prompt": "x", "answer": ""}', 'field "answer": empty'),
    ('{"prompt": "", "answer": "1"}', 'field "prompt": empty'),
    ('{"prompt": " \\n", "answer": "1"}', "empty"),
    ('{"prompt": 5, "answer": "1"}', "but is a number"),
    ('{"prompt": {"content": "x"}, "answer": "1"}', "but is an object"),
    ('{"prompt": [], "answer": "1"}', "empty"), ('{"prompt": ["hi"], "answer": "1"}', "message 0 must be"),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', "message 0 must be"),
    ('{"prompt": [{"role": "user", "content": 1}], "answer": "1"}', "message 0 must be"),
    ('{"prompt": [{"role": "user", "content": "", "name": "x"}], "answer": "1"}', "empty"),
    ('{"prompt": [{"role": "user", "content": " "}], "answer": "1"}', "empty"), (DEEP, "malformed JSON"),
    ('{"prompt": "x", "answer": "\udcff"}', "malformed JSON"),
    ('{"prompt": "a", "answer": "1", "prompt": 2}', "but is a number"),
]
# (name, contents, what is said): files that are broken as a whole
FILES = [
    ("empty.jsonl", b"", "no usable row"), ("blank.jsonl", b"\n\n\n", "3 of 3 rows"),
    ("binary.jsonl", bytes(range(256)), "malformed"),
    ("utf16.jsonl", GOOD.encode("utf-16"), "rows cannot be used"),
    ("list.jsonl", b"[\n" + GOOD.encode() + b"]", "2 of 4 rows"),
    ("empty.parquet", b"", "cannot be read as Parquet"),
    ("cut.parquet", b"PAR1\x00\x00PAR1", "cannot be read as Parquet"),
    ("table.csv", b"prompt,answer\n1,2,3\n", "3 fields, the header names 2"),
    ("model.pkl", b"\x80\x04N.", "not one of"),
    ("rows.jsonl.gz", b"\x1f\x8b\x08", "cannot be read after row 0"),
    ("rows.json", b'{"data": [', "malformed JSON"),
]


def test_there_are_thirty_and_each_is_another():
    assert len(set(ROWS)) == len(ROWS) >= 30 and len(FILES) >= 8


@pytest.mark.parametrize("row, says", ROWS, ids=lambda text: text[:40])
def test_row_13_a_broken_row_is_named_or_counted_and_never_taken(tmp_path, row, says):
    path = tmp_path / "rows.jsonl"
    good = GOOD.splitlines(keepends=True)
    path.write_bytes(f"{good[0]}{row}\n{good[1]}".encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as e:
        make_task("file", path=str(path), held_out_fraction=0.0).problems()
    assert f"1 of 3 rows cannot be used:\n  {path}:2: " in str(e.value) and says in str(e.value), str(e.value)
    assert "skip_bad_rows" in e.value.next_step and len(str(e.value)) < 600
    task = make_task("file", path=str(path), held_out_fraction=0.0, skip_bad_rows=True)
    assert [p.prompt for p in task.problems()] == ["1+1=", "1+2="] and len(task.report.bad) == 1


def test_row_13_rows_that_are_left_out_are_said_at_the_start(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + '{"prompt": 7}\n')
    words = {"task.kind": "file", "task.path": path, "task.skip_bad_rows": "true",
             "rollout.prompts_per_step": 1,
             "task.options": "{held_out_fraction = 0.0}"}
    cfg = load_config("demo", [w for k, v in words.items() for w in (f"--{k}", str(v))])
    assert load_data(cfg, model_config(cfg)).train
    assert f"left out 1 bad rows out of 3; the first: {path}:3: " in capsys.readouterr().out


@pytest.mark.parametrize("name, contents, says", FILES, ids=[name for name, _, _ in FILES])
def test_row_13_a_broken_file_is_refused_by_name(tmp_path, name, contents, says):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=says) as e:
        make_task("file", path=str(tmp_path / name), held_out_fraction=0.0).problems()
    assert name in str(e.value) and len(str(e.value).splitlines()) < 12


# Fuzzing: FUZZ inputs each, six times as many in `make test-thorough`.

FUZZ = 150
fuzzed = settings(max_examples=FUZZ * settings().max_examples // 10)
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4)


def edited(original: bytes, changes) -> bytes:
    for at, length, put in changes:
        start = int(at * len(original))
        original = original[:start] + put + original[start + length :]
    return original


@given(changes=edits)
@fuzzed
def test_row_13_no_bytes_crash_the_reader_of_rows(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    path.write_bytes(edited((GOOD + CHAT).encode(), changes))
    found = read_rows(str(path))
    for row in found.rows:
        assert row.prompt and all(isinstance(answer, str) and answer.strip() for answer in row.answers)
    assert all(b.why and b.line >= 1 for b in found.bad)


@given(changes=edits)
@fuzzed
def test_row_13_no_bytes_crash_the_reader_of_parquet(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("fuzz")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}),
                                folder / "a.parquet")
    (folder / "a.parquet").write_bytes(edited((folder / "a.parquet").read_bytes(), changes))
    try:
        read_rows(str(folder / "a.parquet"))
    except DataError as e:
        assert "cannot be read as Parquet" in str(e)


# Row 38: files of weights

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8, "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder of a model of a few numbers."""
    import jax

    from jaxfp8rl.models.loading import save_params
    from jaxfp8rl.models.module import init_params

    folder = tmp_path_factory.mktemp("model") / "hf"
    cfg = ModelConfig.from_hf(SHAPE)
    save_params(folder, cfg, init_params(cfg, jax.random.key(0)))
    return folder


@given(changes=edits, header=st.booleans())
@fuzzed
def test_row_38_no_bytes_crash_the_reader_of_models(model, tmp_path_factory, changes, header):
    """Changes in the header, which says what is where, or anywhere."""
    folder = tmp_path_factory.mktemp("fuzz")
    contents = (model / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", contents[:8])[0] if header else len(contents)
    (folder / "model.safetensors").write_bytes(edited(contents[:end], changes) + contents[end:])
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    try:
        _, params = load_params(folder)
    except UserError as e:
        assert str(folder) in str(e)
    else:
        assert params


@given(changes=edits, which=st.integers(0, 1))
@fuzzed
def test_row_38_no_bytes_crash_the_reader_of_a_publish_nor_pass_it(tmp_path_factory, changes, which):
    """What it reads is compared with the learner's digest."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("fuzz") / "v"
    array, metas = np.arange(24, dtype=np.float32).reshape(4, 6), (ParamMeta("w", "float32", (4, 6)),)
    write_folder(ArraySource(metas, {"w": array}), folder, 3)
    plan = pieces.plan(metas, [[(0, pieces.whole(metas[0]))]], array.nbytes)
    victim = folder / ("model-00001-of-00001.safetensors", "model.safetensors.index.json")[which]
    before = victim.read_bytes()
    victim.write_bytes(edited(before, changes))
    try:
        read = paths.Folder([folder], metas, plan,
                            array.nbytes).bucket(0, 0).numpy().view(np.float32).reshape(4, 6)
        same = (host_digest(read) == host_digest(array)).all()
        assert same == (read.tobytes() == array.tobytes())
    except BridgeError:
        assert victim.read_bytes() != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_row_38_weights_that_are_pickles_are_refused(model, tmp_path, name):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / name).write_bytes(save({"w": np.zeros(2, np.float32)}))
    with pytest.raises(UserError, match="safetensors"):
        load_params(tmp_path)


def test_row_38_a_huge_header_is_no_reason_to_take_memory(model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + json.dumps({}).encode())
    with pytest.raises(UserError, match="model.safetensors"):
        load_params(tmp_path)
