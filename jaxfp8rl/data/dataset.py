"""The order of problems (seeded, resumable and the same on every machine) and their tokens, checked once at
start-up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfp8rl.data.permutation import coins, permutation
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from jaxfp8rl.data.curriculum import Curriculum
    from jaxfp8rl.data.problem import Problem
    from jaxfp8rl.data.tokenizer import Tokenizer


def fingerprint(items: Sequence[Any]) -> str:
    """SHA-256 over ids and prompts, in order. An item is a Problem, or a (Problem, tokens) pair from
    `prepare`."""
    digest = hashlib.sha256()
    for item in items:
        problem: Problem = item[0] if isinstance(item, tuple) else item
        digest.update(json.dumps([problem.id, problem.prompt]).encode() + b"\n")
    return digest.hexdigest()


def contents(prompts: Sequence[tuple[Problem, tuple[int, ...]]], answers: bool = True) -> str:
    """SHA-256 over everything that a run learns from: the `fingerprint`, the tokens of the prompts and, if
    `answers`, the answers."""
    digest = hashlib.sha256(fingerprint(prompts).encode())
    for problem, tokens in prompts:
        digest.update(json.dumps([len(tokens), *(problem.answers if answers else [""])]).encode())
        digest.update(np.array(tokens, np.int32).tobytes())
    return digest.hexdigest()


def demonstrable[Item: tuple](items: Sequence[Item], name: str) -> list[Item]:
    """The items whose problem has a reference answer that a warm start can imitate. Raises ConfigError if
    there is none."""
    found = [item for item in items if item[0].answer.strip()]
    if items and not found:
        raise ConfigError(
            f'sft.steps: no problem of "{name}" has a reference answer, which a warm start would imitate',
            "set sft.steps = 0, or choose another task for the warm start")
    return found


class PromptStream[Item]:
    """An endless order over items: each epoch is a permutation fixed by (seed, epoch), and a batch may span
    two epochs. With a `curriculum` an item is passed over with a probability of its own, by coins fixed by
    (seed, epoch).

    Raises DataError if there are no items.
    """

    def __init__(self, items: Sequence[Item], seed: int, curriculum: Curriculum | None = None):
        if not items:
            raise DataError("there are no problems to train on",
                            "check task.options and task.max_prompt_tokens")
        self._items, self._seed, self._fingerprint = items, seed, fingerprint(items)
        self.curriculum = curriculum
        self._seek(0, 0)

    def next(self, n: int) -> list[Item]:
        """The next n items."""
        return [self._items[i] for i in self.draw(n)]

    def draw(self, n: int) -> list[int]:
        """The indices of the next n items."""
        batch = []
        while len(batch) < n:
            if self._position == len(self._items):
                self._seek(self._epoch + 1, 0)
            item, coin = int(self._order[self._position]), self._coins[self._position]
            self._position += 1
            if self.curriculum is None or coin < self.curriculum.weight(item):
                batch.append(item)
        return batch

    def state(self) -> dict[str, Any]:
        """The position in the stream, in a form that JSON can represent."""
        solved = {"solved": self.curriculum.state()} if self.curriculum else {}
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position,
                "items": len(self._items),
                "fingerprint": self._fingerprint, **solved}

    @classmethod
    def from_state(cls, items: Sequence[Item], state: dict[str, Any],
                   curriculum: Curriculum | None = None) -> PromptStream[Item]:
        """Continue from `state`; a `curriculum` takes up its solve rates. Raises CheckpointError if the state
        is damaged or belongs to other data."""
        try:
            stream = cls(items, int(state["seed"]), curriculum)
            epoch, position, have = int(state["epoch"]), int(state["position"]), state["fingerprint"]
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"the data state of the checkpoint is damaged: {e!r}",
                                  "resume from an older one") from e
        if have != stream._fingerprint:
            raise CheckpointError(
                f"the checkpoint was taken on other problems ({state.get('items')} with fingerprint "
                f"{str(have)[:12]}; now {len(items)} with {stream._fingerprint[:12]})",
                "restore task.options and the task's files, or start a new run from the weights (--fork)")
        if epoch < 0 or not 0 <= position <= len(items):
            raise CheckpointError(
                f"the data state of the checkpoint is damaged: epoch {epoch}, position {position} "
                f"of {len(items)}", "resume from an older one")
        stream._seek(epoch, position)
        if curriculum:
            curriculum.restore(state.get("solved", {}))
        return stream

    def _seek(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = permutation(len(self._items), self._seed, epoch)
        self._coins = coins(len(self._items), self._seed, epoch)


@dataclasses.dataclass(frozen=True)
class PrepareReport:
    """How many problems `prepare` kept, and how many it skipped because their prompts were empty, too long,
    or refused by the template or the tokenizer. `longest`: tokens of the longest prompt kept. `first`: why
    the first problem was skipped."""

    kept: int
    empty: int
    too_long: int
    longest: int
    refused: int = 0
    first: str = ""


def encode_prompt(problem: Problem, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids [T] of a prompt; chat messages go through the tokenizer's template. The result may be empty.
    Raises DataError if the template or the vocabulary refuses the prompt."""
    if isinstance(problem.prompt, str):
        return tuple(tokenizer.encode(problem.prompt))
    return tuple(tokenizer.apply_chat(problem.prompt))


def prepare(problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt_tokens: int,
            skip: bool = False) -> tuple[list[tuple[Problem, tuple[int, ...]]], PrepareReport]:
    """Encode every prompt once, at start-up. With `skip`, prompts that are empty, too long or refused are
    skipped and counted.

    Raises DataError, naming the first five such prompts, if `skip` is off or if no prompt is left.
    """
    kept, bad, counts = [], [], {"empty": 0, "too_long": 0, "refused": 0}
    for problem in problems:
        try:
            tokens = encode_prompt(problem, tokenizer)
        except DataError as e:
            kind, why = "refused", e.message
        else:
            if 0 < len(tokens) <= max_prompt_tokens:
                kept.append((problem, tokens))
                continue
            kind = "too_long" if tokens else "empty"
            why = (f"{len(tokens)} tokens, the limit is {max_prompt_tokens}" if tokens
                   else "the prompt has no tokens")
        counts[kind] += 1
        bad.append(f'problem "{problem.id}": {why}')
    if bad and (not skip or not kept):
        more = f"\n  ... and {len(bad) - 5} more" if len(bad) > 5 else ""
        ways = {"too_long": "raise task.max_prompt_tokens, ",
                "refused": "change the roles or the text, name a tokenizer that has the characters with "
                           "model.tokenizer, "}
        raise DataError(f"{len(bad)} of {len(problems)} prompts cannot be used:\n  " + "\n  ".join(bad[:5])
                        + more,
                        "".join(way for kind, way in ways.items() if counts[kind])
                        + "or set task.skip_bad_rows = true to skip and count them")
    longest = max((len(tokens) for _, tokens in kept), default=0)
    return kept, PrepareReport(len(kept), **counts, longest=longest, first=bad[0] if bad else "")
