"""Requests that are refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxfp8rl.errors import UserError


class Refused(UserError):
    """A request that this server does not take. `status`: of the HTTP answer, where it is refused at once."""

    def __init__(self, message: str, next_step: str = "", status: int = 400):
        super().__init__(message, next_step)
        self.status = status

    def body(self) -> dict[str, str]:
        """The JSON of the answer; the client prints all of it."""
        return {"error": self.message, "next_step": self.next_step}


def check_tokens(where: str, ids: Sequence[int] | np.ndarray, words: int, masked: str = "") -> None:
    """Raise Refused, which names the first of `ids` that is not a whole number in a vocabulary of `words`.
    masked: what to do instead of marking a position by a negative number."""
    ids = np.asarray(ids)
    if not (wrong := np.flatnonzero((ids < 0) | (ids >= words) | (ids != np.floor(ids)))).size:
        return
    at = int(wrong[0])
    raise Refused(f"{where}[{at}] = {ids[at]} is not a token of the vocabulary of {words}, 0 to {words - 1}",
                  masked if masked and ids[at] < 0 else "encode with the base model's tokenizer; a client on "
                  "the server's machine has it from get_tokenizer()")
