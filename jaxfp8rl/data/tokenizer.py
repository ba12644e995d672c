"""Text to token ids and back, with the `tokenizer.json` of a Hugging Face folder or with one token per
character.

It reads the files that transformers writes, through the `tokenizers` package; transformers itself is not
needed.
"""

from __future__ import annotations

import copy
import datetime
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxfp8rl.errors import ConfigError, DataError, ModelError, nearest

if TYPE_CHECKING:  # the documentation's environment reads the schema, and so this module, without numpy
    import numpy as np

CHARS_PREFIX = "chars:"
DATE = "2024-07-26"  # the date that Llama's templates print by default
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OURS = {"messages", "add_generation_prompt"}  # variables of a template that a run sets itself


class Tokenizer:
    """A `tokenizers.Tokenizer` with its special ids and chat template.

    `eos_token_ids`: every id that ends a completion, the usual one first. `vocab_size`: largest id + 1.
    """

    def __init__(self, backend: Any, config: Mapping[str, Any], eos_token_ids: Sequence[int],
                 pad_token_id: int,
                 chat_templates: Mapping[str, str] | None = None, date: str = DATE,
                 template_kwargs: Mapping[str, Any] | None = None):
        # A folder may contain truncation and padding from its last use; both would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._config, self._date = backend, dict(config), date
        self._templates, self._kwargs = dict(chat_templates or {}), dict(template_kwargs or {})
        self.eos_token_ids, self.pad_token_id = tuple(eos_token_ids), pad_token_id
        self._own_eos, self._spoken = self.eos_token_ids, frozenset()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        if self._kwargs:
            self._check_kwargs()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids [T]. `add_special_tokens` adds the special tokens that start a text (a BOS).

        Raises DataError if the text has characters outside a vocabulary that has no unknown token.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as e:  # tokenizers raises bare Exception
            # surrogates, which the library cannot even look up
            half = sorted({c for c in text if "\ud800" <= c <= "\udfff"})
            unknown = half or sorted({c for c in text if self._backend.token_to_id(c) is None})
            why = f"the vocabulary lacks {', '.join(map(repr, unknown))}" if unknown else e
            raise DataError(f"cannot encode {text[:60]!r}: {why}",
                            "use a tokenizer whose vocabulary covers the task's text") from e

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of ids [T]. An id without a token (a model's vocabulary may be padded) becomes U+FFFD
        instead of vanishing."""
        runs = itertools.groupby(map(int, ids), lambda i: self._backend.id_to_token(i) is not None)
        return "".join(self._backend.decode(list(run), skip_special_tokens=skip_special_tokens) if known
                       else "\ufffd" * len(list(run)) for known, run in runs)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages (`role`, `content`) in the text format that the model was trained on.

        Raises ModelError if the folder has no chat template, DataError if the template refuses the messages.
        """
        template = self._compiled
        variables = {"tools": None, "documents": None, **self._special, **self._kwargs}
        try:
            return template.render(messages=[dict(m) for m in messages],
                                   add_generation_prompt=add_generation_prompt, **variables)
        except Exception as e:  # a template can raise any error: None + "text", 1 / 0
            raise DataError(f"the chat template refused the messages: {e}",
                            "change the roles or the system prompt") from e

    @functools.cached_property
    def _compiled(self):
        """The template, compiled once: compiling takes a hundred times longer than rendering."""
        import jinja2

        try:
            return _jinja_environment(self._date).from_string(self.chat_template)
        except jinja2.TemplateError as e:
            raise ModelError(f"the chat template is damaged: {e}",
                             "download the tokenizer's folder again") from e

    @property
    def chat_template(self) -> str:
        """The template to use. Of several, transformers takes "tool_use" if there are tools, otherwise
        "default"."""
        name = "tool_use" if self._kwargs.get(
            "tools") is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ModelError("this tokenizer has no chat template (chat_template.jinja, or chat_template in "
                             "tokenizer_config.json)",
                             "use plain prompts (task.chat = false) or an instruct model")
        return self._templates[name]

    @functools.cached_property
    def _special(self) -> dict[str, str]:
        return {k: _token_text(self._config[k]) for k in _SPECIAL if self._config.get(k)}

    def _read(self) -> set[str]:
        """The variables that the template reads."""
        import jinja2.meta

        environment = self._compiled.environment
        return jinja2.meta.find_undeclared_variables(
            environment.parse(self.chat_template)) - environment.globals.keys()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Tokenizer | None:
        """The same tokenizer with a template that writes these tools; None if the template reads none. Raises
        ModelError if there is no template."""
        other = copy.copy(self)
        other.__dict__.pop("_compiled", None)  # with tools it may be another template
        other._kwargs = {**self._kwargs, "tools": list(tools)}
        return other if "tools" in other._read() else None

    def _check_kwargs(self) -> None:
        """Raise ConfigError for a variable that the template never reads, because it would silently have no
        effect."""
        read = self._read()
        known = read - _OURS - set(_SPECIAL)
        for name in self._kwargs.keys() - (read - _OURS):
            key = f"task.chat_template_kwargs.{name}"
            if name in _OURS:
                raise ConfigError(f"{key}: set by the run itself", "leave it out")
            dated = "date" in name and "strftime_now" in self.chat_template
            day = "; task.date sets the date of strftime_now" if dated else ""
            hint = nearest(name, known) if known else " (it reads none)"
            raise ConfigError(f"{key}: this tokenizer's chat template reads no such variable{hint}{day}",
                              "leave it out: it would change no prompt")
        for name in self._kwargs.keys() & {"tools", "documents"}:
            value = self._kwargs[name]
            if not (isinstance(value, list) and all(isinstance(x, dict) for x in value)):
                key = f"task.chat_template_kwargs.{name}"
                raise ConfigError(f"{key}: must be a list of tables", f"[[{key}]]")

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids [T] of messages, ending where the assistant's reply begins. Raises as `render_chat`."""
        # the template writes its own BOS
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def added_tokens(self) -> dict[str, int]:
        """The tokens that were added to the vocabulary, special ones among them: text -> id."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def token_id(self, text: str) -> int | None:
        """The id if `text` is a single token, otherwise None."""
        found = self._backend.token_to_id(text)
        if found is not None:
            return found
        try:
            ids = self.encode(text, add_special_tokens=False)
        except DataError:  # a character that the tokenizer does not have
            return None
        return ids[0] if len(ids) == 1 and self.decode(ids, skip_special_tokens=False) == text else None

    def tokens_with(self, strings: Sequence[str]) -> tuple[int, ...]:
        """The ids of all tokens whose text contains one of `strings`."""
        ids = sorted(self._backend.get_vocab(with_added_tokens=True).values()) if strings else ()
        texts = self._backend.decode_batch([[i] for i in ids], skip_special_tokens=False) if strings else ()
        return tuple(i for i, text in zip(ids, texts) if any(string in text for string in strings))

    def with_stops(self, turn_end: int | None, token_ids: Sequence[int]) -> Tokenizer:
        """The same tokenizer with more tokens that end a completion: first the token that ends a turn, then
        `token_ids`."""
        other, ends = copy.copy(self), () if turn_end is None else (turn_end,)
        other.eos_token_ids = tuple(dict.fromkeys([*ends, *self.eos_token_ids, *token_ids]))
        special = {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        other._spoken = frozenset(token_ids) - special - {*ends, *self._own_eos}
        return other

    def completion_text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a completion [T]. Only the special token that ended it is removed: a sampled <pad> must
        not vanish from "1<pad>9". A stop token that is an ordinary word stays as well."""
        ids = [int(i) for i in ids]
        silent = ids and ids[-1] in self.eos_token_ids and ids[-1] not in self._spoken
        return self.decode(ids[:-1] if silent else ids, skip_special_tokens=False)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> its id, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary and the special ids. Stop tokens from a config are not included."""
        vocab = sorted(self.vocabulary.items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps([vocab, self._own_eos, self.pad_token_id]).encode()).hexdigest()

    def save(self, folder: str) -> None:
        """Write a folder that `load_tokenizer`, transformers and vLLM can read."""
        os.makedirs(folder, exist_ok=True)
        self._backend.save(os.path.join(folder, "tokenizer.json"))
        config = {k: v for k, v in self._config.items() if k != "chat_template"}
        named = [{"name": name, "template": template} for name, template in self._templates.items()]
        config |= {"chat_template": named if self._templates.keys() - {"default"}
                   else named[0]["template"]} if named else {}
        _write_json(folder, "tokenizer_config.json", config)
        _write_json(folder, "generation_config.json",
                    {"eos_token_id": list(self.eos_token_ids), "pad_token_id": self.pad_token_id})


def load_tokenizer(spec: str, date: str = DATE,
                   template_kwargs: Mapping[str, Any] | None = None) -> Tokenizer:
    """A tokenizer from a Hugging Face folder, or from `chars:0123456789+=`: one token for each character,
    with `<pad>` 0 and `<eos>` 1.

    date: the date (YYYY-MM-DD) that a chat template prints as today. template_kwargs: other variables of the
    template.

    Raises ModelError if the folder lacks a file, a file is damaged, or no end-of-sequence token is known;
    ConfigError for a variable that the template never reads.
    """
    if not spec.startswith(CHARS_PREFIX):
        return _from_folder(os.path.expanduser(spec), date, template_kwargs)
    if template_kwargs:
        raise ConfigError(f'task.chat_template_kwargs: model.tokenizer = "{spec}" has no chat template',
                          "leave them out")
    return _char_tokenizer(spec.removeprefix(CHARS_PREFIX))


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ModelError if the tokenizer can produce an id for which the model has no embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"the tokenizer's largest id is {tokenizer.vocab_size - 1}, the model's vocabulary has "
            f"{vocab_size} entries",
            "use the tokenizer that came with the model, or raise vocab_size")


def _char_tokenizer(chars: str) -> Tokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if not chars or len(set(chars)) != len(chars):
        raise ModelError(f"chars:{chars}: name each character once", 'for example "chars:0123456789+-*="')
    special = ("<pad>", "<eos>")
    backend = Backend(models.WordLevel({token: i for i, token in enumerate((*special, *chars))}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
              "clean_up_tokenization_spaces": False}
    return Tokenizer(backend, config, eos_token_ids=(1,), pad_token_id=0)


def _from_folder(folder: str, date: str, template_kwargs: Mapping[str, Any] | None) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ModelError(f"no tokenizer.json in {folder!r}",
                         "download the model's folder first (nothing is fetched at run "
                         "time); a folder with tokenizer.model alone: load and save it once "
                         "with transformers")
    try:
        backend = Backend.from_file(path)
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelError(f"{path} is damaged: {e}", "download it again") from e
    config = _read_json(folder, "tokenizer_config.json")
    eos = _eos_token_ids(folder, config, backend)
    pad = backend.token_to_id(_token_text(config["pad_token"])) if config.get("pad_token") else None
    return Tokenizer(backend, config, eos, eos[0] if pad is None else pad, _chat_templates(folder, config),
                     date, template_kwargs)


def _eos_token_ids(folder: str, config: Mapping[str, Any], backend: Any) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's own, then those of generation_config.json (chat models
    list several), or else of config.json.

    The tokenizer's own id ends a turn and comes first. The list itself may begin with the id that ends a
    text, as Llama 3.1's does.
    """
    ids = _as_list(backend.token_to_id(_token_text(config["eos_token"]))) if config.get("eos_token") else []
    ids += _as_list(_read_json(folder, "generation_config.json").get("eos_token_id"))
    ids += _as_list(_read_json(folder, "config.json").get("eos_token_id")) if not ids else []
    if not ids:
        raise ModelError(
            f"{folder}: no end-of-sequence token in generation_config.json, tokenizer_config.json or "
            "config.json", 'set "eos_token" in tokenizer_config.json')
    return tuple(dict.fromkeys(ids))


def _chat_templates(folder: str, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name. Files take precedence over tokenizer_config.json, as in transformers."""
    files = {"default": os.path.join(folder, "chat_template.jinja")}
    others = os.path.join(folder, "additional_chat_templates")
    names = sorted(os.listdir(others)) if os.path.isdir(others) else []
    files |= {name.removesuffix(".jinja"): os.path.join(others, name) for name in names
              if name.endswith(".jinja")}
    if found := {name: _read_text(path) for name, path in files.items() if os.path.isfile(path)}:
        return found
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        return {t["name"]: t["template"] for t in template}
    return {"default": template} if template else {}


def _jinja_environment(date: str):
    """The Jinja dialect of chat templates: sandboxed, with trimmed blocks, loop controls, `{% generation %}`
    and two helper functions."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's tokens for supervised masks; here it renders as its
        content."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson  # jinja's own escapes HTML
    environment.globals |= {"raise_exception": raise_exception,
                            "strftime_now": lambda form: datetime.datetime.fromisoformat(date).strftime(form)}
    return environment


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8") as f:
        return f.read()


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """The object in the file; {} if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except ValueError as e:
        raise ModelError(f"{path} is damaged: {e}", "download it again") from e


def _write_json(folder: str, name: str, value: dict[str, Any]) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
