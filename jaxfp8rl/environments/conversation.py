"""Tokens stay tokens: the prompt of a turn is the exact tokens before it, and then what the template adds.

The template renders the whole history and the new observation. Where that text begins with what the engine
has seen, only the rest of it is encoded, and appended; a turn is never decoded and encoded again. White space
at the ends of a turn, which many templates trim, does not count. Where the template writes the history in
another way, because it drops earlier thoughts for example, its text is a new prompt: a new branch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridges.api import Completion
from jaxfp8rl.data.messages import Prompt
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.environments.calls import told
from jaxfp8rl.environments.protocol import Message
from jaxfp8rl.environments.trajectory import Branch, Segment


class Conversation:
    """A trajectory's tokens as it grows. `context`: the prompt of the next turn.

    `text`: the problem's prompt, plain or messages. Plain text is continued by plain text, without a
    template.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, token_ids: Sequence[int]):
        self._tokenizer = self._bare = tokenizer
        self._chat = not isinstance(prompt, str)
        self._messages = [] if isinstance(prompt, str) else [dict(m) for m in prompt]
        # of the branch: (text, whether it is a turn's)
        self._pieces = [(tokenizer.render_chat(self._messages) if self._chat else "", False)]
        self._closed: list[Branch] = []
        self._prompt, self._segments = tuple(token_ids), list[Segment]()
        self.context = self._prompt

    def said(self, completion: Completion) -> str:
        """Take a turn of the policy -> its text, without the token that ended it."""
        ids = np.asarray(completion.token_ids, np.int32)
        text = self._tokenizer.completion_text(ids)
        self._segments.append(Segment(ids, completion))
        self.context += tuple(ids.tolist())
        self._messages.append({"role": "assistant", "content": text})
        self._pieces.append((text, True))
        return text

    def heard(self, observation: str | Sequence[Message],
              tools: Sequence[dict[str, Any]] | None = None) -> None:
        """Append an observation, "" for none. With `tools`, [] for none, its messages are a whole
        conversation, which goes on in a new branch. Raises DataError if the template refuses them."""
        if tools is not None:
            return self._anew(observation, tools)
        if not self._chat:
            text = observation if isinstance(observation, str) else "".join(m["content"] for m in observation)
            return self._append(text)
        if not observation:
            return None
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        self._messages += [dict(m) for m in messages]
        text = self._tokenizer.render_chat(self._messages)
        known = _length_of(self._pieces, text)
        return self._rewrite(text) if known is None else self._append(text[known:])

    def branches(self) -> list[Branch]:
        """All branches with a turn, tokens behind the last turn left out."""
        segments = list(self._segments)
        while segments and segments[-1].completion is None:
            segments.pop()
        return [*self._closed, *([Branch.of(self._prompt, segments)] if segments else [])]

    def _append(self, text: str) -> None:
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        ends = self._tokenizer.eos_token_ids
        if self._chat and ids and ids[0] in ends and self.context[-1] in ends and self._segments:
            ids = ids[1:]  # the policy has ended its turn itself
        if ids:
            self._segments.append(Segment(np.asarray(ids, np.int32)))
        self.context += tuple(ids)
        self._pieces.append((text, False))

    def _anew(self, messages: str | Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        assert not isinstance(messages, str)  # an Anew has messages
        knows = _with_tools(self._bare, json.dumps(tools)) if tools else self._bare
        self._messages = [dict(m) for m in (messages if knows else told(tools, messages))]
        self._tokenizer, self._chat = knows or self._bare, True
        self._rewrite(self._tokenizer.render_chat(self._messages))

    def _rewrite(self, text: str) -> None:
        self._closed = self.branches()
        self.context = self._prompt = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        self._segments, self._pieces = [], [(text, False)]


# all trajectories of an environment have the same tools, and compiling a template is slow
@functools.lru_cache(64)
def _with_tools(tokenizer: Tokenizer, tools_json: str) -> Tokenizer | None:
    return tokenizer.with_tools(json.loads(tools_json))


def _length_of(pieces: Sequence[tuple[str, bool]], text: str) -> int | None:
    """How many characters of `text` the pieces are, one after the other; None if it does not begin with them.
    A turn may stand there trimmed."""
    at = 0
    for piece, is_turn in pieces:
        forms = (piece, piece.strip(), piece.rstrip(), piece.lstrip()) if is_turn else (piece,)
        form = next((f for f in forms if text.startswith(f, at)), None)
        if form is None:
            return None
        at += len(form)
    return at
