"""Requests that are refused."""

from __future__ import annotations

from jaxfp8rl.errors import UserError


class Refused(UserError):
    """A request that this server does not take. `status`: of the HTTP answer, where it is refused at once."""

    def __init__(self, message: str, next_step: str = "", status: int = 400):
        super().__init__(message, next_step)
        self.status = status

    def body(self) -> dict[str, str]:
        """The JSON of the answer; the client prints all of it."""
        return {"error": self.message, "next_step": self.next_step}
