"""Where a completion ends besides the tokenizer's own end-of-sequence tokens.

    the chat template's end of a turn   a token, read off the template, where prompts are rendered with it
    rollout.stop_token_ids              tokens
    rollout.stop                        strings, however tokens put them together

Engines know tokens alone. They stop at each token that has a stop string in its own text; a string of several
tokens is found when the text is there, and what was sampled behind it is dropped. The token in which a stop
ends is the completion's last one, with the log-probability that it was drawn with, and is learned from.
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
    """tokenizer: its end-of-sequence tokens are all that end a completion. strings: rollout.stop. token_ids:
    those that an engine stops at, for both. notes: what a run says of them when it starts."""

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
        """The least number of tokens whose text has a stop string, by bisection; None where all of them have
        none."""
        if not self.strings or not self._stopped(ids):
            return None
        low, high = 0, len(ids)  # the text of `low` tokens has none, that of `high` has one
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stopped(ids[:middle]) else (middle, high)
        return high

    def _stopped(self, ids: Sequence[int] | np.ndarray) -> bool:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return any(string in text for string in self.strings)


def stops_of(rollout: Rollout, tokenizer: Tokenizer, chat: bool) -> Stops:
    """What ends the completions of a run; `chat`: its prompts are rendered with the chat template. Raises
    ConfigError for a stop token that the tokenizer does not have."""
    end, note = _turn_end(tokenizer) if chat else (None, "")
    ends = tokenizer.with_stops(end, [_token_id(tokenizer, token) for token in rollout.stop_token_ids])
    token_ids = dict.fromkeys([*ends.eos_token_ids, *tokenizer.tokens_with(rollout.stop)])
    return Stops(ends, rollout.stop, tuple(token_ids), (note,) if note else ())


def _token_id(tokenizer: Tokenizer, token: int | str) -> int:
    found = tokenizer.token_id(token) if isinstance(token, str) else token
    if found is None:
        raise ConfigError(f"rollout.stop_token_ids: {token!r} is no token of the tokenizer",
                          f"set rollout.stop = [{token!r}]")
    if not 0 <= found < tokenizer.vocab_size:
        raise ConfigError(
            f"rollout.stop_token_ids: there is no token {found}, the tokenizer has 0 to {tokenizer.vocab_size - 1}",
            'give an id, or the token as it is written: ["<|im_end|>"]')
    return found


def _turn_end(tokenizer: Tokenizer) -> tuple[int | None, str]:
    """(the token that ends a turn of the assistant in the chat template, or None; what there is to say of it,
    or "")."""
    eos = ", ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in tokenizer.eos_token_ids)
    otherwise = f"completions stop at {eos} alone, unless rollout.stop_token_ids or rollout.stop name what the model writes"
    try:
        behind = [_behind_reply(tokenizer, messages) for messages in ([ASKED, REPLY], [ASKED, REPLY, NEXT])]
    except DataError as e:
        return None, f"the chat template shows no end of an assistant's turn ({e.message}): {otherwise}"
    token = next(filter(None, (_first_token(tokenizer, text) for text in behind)), None)
    if token is None:
        return None, f"the chat template ends a turn with {behind[0] or behind[1]!r}, which is no token of its own: {otherwise}"
    end = tokenizer.added_tokens()[token]
    note = (
        f"the chat template ends a turn with {token!r} ({end}), which the tokenizer's eos ({eos}) does not name: "
        "completions stop there, too")
    return end, "" if end in tokenizer.eos_token_ids else note


def _behind_reply(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> str:
    """What the template writes behind the assistant's words, up to the next ones."""
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    return text.rpartition(REPLY["content"])[2].partition(NEXT["content"])[0]


def _first_token(tokenizer: Tokenizer, text: str) -> str | None:
    """The first token in `text` that was added to the vocabulary and is not white space (Gemma's line breaks
    are)."""
    added = sorted(filter(str.strip, tokenizer.added_tokens()), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, added)), text) if added else None
    return found and found[0]
