"""A tokenizer for random weights: byte-level BPE with a chat template and a vocabulary of any size, made
without a download."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.errors import ModelError

PAD, TURN, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LEARNED = 8192  # tokens that are merged, at most; BPE has 256 besides, one a byte
LEAST = 512  # the smallest vocabulary
ENDS = 24  # with these many of 150,000 tokens about half of the completions of 4,096 tokens end early
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def random_tokenizer(vocab_size: int, ends: int = ENDS) -> Tokenizer:
    """A tokenizer whose ids are 0 .. `vocab_size` - 1, each with a text.

    Its merges are learned from this package's own source, so English and code take about as many tokens as
    with a published tokenizer. Ids that no text gives are named " token1234". `ends` ids end a completion:
    <|im_end|>, and others of these, so that a model that samples at random ends some. Raises ModelError for
    too small a vocabulary and for more ends than there are such ids.
    """
    if vocab_size < LEAST:
        raise ModelError(f"a vocabulary of {vocab_size} has no room for all bytes", f"take {LEAST} or more")
    backend, named = _backend(vocab_size)
    if not 1 <= ends <= len(named) + 1:
        raise ModelError(f"--ends {ends}: 1 to {len(named) + 1} tokens can end a completion",
                         f"leave it out for {ENDS}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END,
              "clean_up_tokenization_spaces": False}
    return Tokenizer(backend, config, [vocab_size - 1, *named[: ends - 1]], vocab_size - len(SPECIAL),
                     {"default": CHATML})


def _backend(vocab_size: int):
    """(the `tokenizers.Tokenizer`, the ids that no text gives)."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    content = json.loads(_learned(min(LEARNED, vocab_size // 2 - 256)))
    vocabulary, size = content["model"]["vocab"], vocab_size - len(SPECIAL)
    named = list(range(len(vocabulary), size))
    # BPE splits letters from digits: none of these is learned
    vocabulary |= {f"Ġtoken{i}": i for i in named}
    backend = Backend.from_str(json.dumps(content))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend, named


@functools.cache
def _learned(merges: int) -> str:
    """The JSON of a byte-level BPE with so many merges."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=bytes_, show_progress=False)
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    backend.train_from_iterator((path.read_text(encoding="utf-8") for path in sources), trainer)
    return backend.to_str()
