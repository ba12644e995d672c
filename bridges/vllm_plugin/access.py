"""Who may speak to a guarded server: the token of its users, and the lease of its one learner."""

from __future__ import annotations

import dataclasses
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bridges.api import BridgeError

TOKEN_FILE = "JAXFP8RL_TOKEN_FILE"  # the environment variable that names it
TOKEN_CHARACTERS = 16
MAKE_ONE = "make one: (umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' > token)"
LEASE_SECONDS = 6.0
LONGEST_LEASE = 60.0


def token_of_environment() -> str:
    """The token in the file that `JAXFP8RL_TOKEN_FILE` names. Raises BridgeError without the variable, and
    for what `read_token` refuses."""
    if not (path := os.environ.get(TOKEN_FILE)):
        raise BridgeError(f"the guard of this server needs a token, and {TOKEN_FILE} is not set",
                          f"{MAKE_ONE}, then set {TOKEN_FILE}")
    return read_token(Path(path))


def read_token(path: Path) -> str:
    """The token in a file. Raises BridgeError if the file cannot be read, if other users can read or write
    it, or if the token is short or holds other characters than printable ASCII."""
    try:
        with open(path) as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BridgeError(f"{path}: the token cannot be read: {e}", MAKE_ONE) from e
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BridgeError(f"{path}: every user of this machine can read or write the token "
                          f"(mode {stat.filemode(mode)})", f"chmod 600 {path}")
    if len(token) < TOKEN_CHARACTERS or not (token.isascii() and token.isprintable()):
        raise BridgeError(f"{path}: a token has at least {TOKEN_CHARACTERS} printable ASCII characters",
                          MAKE_ONE)
    return token


class Token:
    """Compares the `authorization` header of requests with the token, in a time that does not depend on the
    header's bytes."""

    def __init__(self, token: str):
        self._want = f"Bearer {token}".encode()

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether exactly one `authorization` header is there, and is right."""
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return hmac.compare_digest(given[0] if len(given) == 1 else b"", self._want)


class LeaseTaken(BridgeError):
    """Another learner holds the lease."""


@dataclasses.dataclass
class Lease:
    """One learner's right to publish. It ends by itself unless its holder renews it in time.

    `clock` counts seconds. The key is a secret of the holder.
    """

    clock: Callable[[], float] = time.monotonic
    holder: str = ""
    key: str = ""
    until: float = 0.0

    def held(self) -> bool:
        return bool(self.key) and self.clock() < self.until

    def current(self) -> str:
        """The key, or "" if nobody holds the lease."""
        return self.key if self.held() else ""

    def take(self, holder: str, seconds: float, key: str = "") -> str:
        """Take or renew the lease for `seconds`, at most a minute -> the key. Raises LeaseTaken, which names
        the holder, if another holds it, and BridgeError if `key` is that of a lease that has ended."""
        if not (isinstance(seconds, int | float) and 0 < seconds <= LONGEST_LEASE):
            raise BridgeError(f"a lease of {seconds!r} seconds",
                              f"ask for more than 0 and at most {LONGEST_LEASE:g}, and renew it")
        if self.held() and not self.owned_by(key):
            raise LeaseTaken(f"{self.holder} is this engine's learner, for another "
                             f"{self.until - self.clock():.1f} s unless it renews its lease",
                             "stop that learner, or wait until its lease has ended")
        if key and not self.held():
            raise BridgeError("the lease has ended: it was not renewed in time", "open the transport again")
        self.key = key or secrets.token_urlsafe(16)
        self.holder, self.until = holder or self.holder, self.clock() + seconds
        return self.key

    def owned_by(self, key: str) -> bool:
        return self.held() and hmac.compare_digest(
            key.encode(errors="surrogatepass"), self.key.encode())

    def release(self, key: str) -> None:
        """End the lease. Another's key does nothing."""
        if self.owned_by(key):
            self.key, self.until = "", 0.0
