"""Stops of a completion besides the tokenizer's own end-of-sequence tokens.

    the chat template's end of a turn   a token, read off the template, if prompts are rendered with it
    rollout.stop_token_ids              tokens
    rollout.stop                        strings, whichever tokens they are made of

Engines only know tokens. They stop at each token whose own text contains a stop string. A stop string of
several tokens is found after sampling, and the tokens behind it are dropped. The token in which a stop ends
is the last token of the completion; it keeps its log-probability and is learned from.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from bridges.api import Completion, GenRequest
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.errors import ConfigError, DataError

ASKED = {"role": "user", "content": "A question of the user."}
REPLY = {"role": "assistant", "content": "A reply of the assistant."}
NEXT = {"role": "user", "content": "What the user says next."}


@dataclasses.dataclass(frozen=True)
class Stops:
    """tokenizer: its end-of-sequence tokens include every stop token. strings: rollout.stop. token_ids: the
    tokens at which an engine stops, for both. notes: start-up messages about them."""

    tokenizer: Tokenizer
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    notes: tuple[str, ...]

    def cut(self, request: GenRequest, completion: Completion) -> Completion:
        """The completion up to the token in which the first stop string is complete."""
        length = self._length(completion.token_ids)
        if length is None:
            return completion
        return dataclasses.replace(completion.first(length, len(request.prompt_token_ids)),
                                   finish_reason="stop")

    def _length(self, ids: Sequence[int] | np.ndarray) -> int | None:
        """The smallest number of tokens whose text contains a stop string, found by bisection; None if the
        whole text contains none."""
        if not self.strings or not self._stopped(ids):
            return None
        low, high = 0, len(ids)  # the text of `low` tokens contains none, the text of `high` tokens one
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stopped(ids[:middle]) else (middle, high)
        return high

    def _stopped(self, ids: Sequence[int] | np.ndarray) -> bool:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return any(string in text for string in self.strings)


def stops_of(rollout: Rollout, tokenizer: Tokenizer, chat: bool) -> Stops:
    """The stops of a run; `chat`: its prompts are rendered with the chat template. Raises ConfigError for a
    stop token that the tokenizer does not have."""
    end, note = _turn_end(tokenizer) if chat else (None, "")
    ends = tokenizer.with_stops(end, [_token_id(tokenizer, token) for token in rollout.stop_token_ids])
    token_ids = dict.fromkeys([*ends.eos_token_ids, *tokenizer.tokens_with(rollout.stop)])
    return Stops(ends, rollout.stop, tuple(token_ids), (note,) if note else ())


def _token_id(tokenizer: Tokenizer, token: int | str) -> int:
    found = tokenizer.token_id(token) if isinstance(token, str) else token
    if found is None:
        raise ConfigError(f"rollout.stop_token_ids: {token!r} is not a token of the tokenizer",
                          f"set rollout.stop = [{token!r}]")
    if not 0 <= found < tokenizer.vocab_size:
        raise ConfigError(
            f"rollout.stop_token_ids: there is no token {found}; "
            f"ids run from 0 to {tokenizer.vocab_size - 1}",
            'give an id, or the text of the token: ["<|im_end|>"]')
    return found


def _turn_end(tokenizer: Tokenizer) -> tuple[int | None, str]:
    """(the token that ends an assistant's turn in the chat template, or None; a note about it, or "")."""
    eos = ", ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in tokenizer.eos_token_ids)
    otherwise = (f"completions stop only at {eos}, unless rollout.stop_token_ids or rollout.stop "
                 "names the text with which the model ends a turn")
    try:
        behind = [_behind_reply(tokenizer, messages) for messages in ([ASKED, REPLY], [ASKED, REPLY, NEXT])]
    except DataError as e:
        return None, f"the chat template shows no end of an assistant's turn ({e.message}): {otherwise}"
    token = next(filter(None, (_first_token(tokenizer, text) for text in behind)), None)
    if token is None:
        ending = behind[0] or behind[1]
        problem = f"the chat template ends a turn with {ending!r}, which is not a single token"
        return None, f"{problem}: {otherwise}"
    end = tokenizer.added_tokens()[token]
    note = (
        f"the chat template ends a turn with {token!r} ({end}), which is not among the tokenizer's "
        f"eos ({eos}): completions stop there, too")
    return end, "" if end in tokenizer.eos_token_ids else note


def _behind_reply(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> str:
    """The text that the template writes between an assistant's message and the next message."""
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    return text.rpartition(REPLY["content"])[2].partition(NEXT["content"])[0]


def _first_token(tokenizer: Tokenizer, text: str) -> str | None:
    """The first added token of the vocabulary in `text` that is not white space (Gemma's line breaks are
    added tokens)."""
    added = sorted(filter(str.strip, tokenizer.added_tokens()), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, added)), text) if added else None
    return found and found[0]
