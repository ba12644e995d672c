"""A tool that reads a SQLite database: one query at a time, which cannot write, attach a file or run for
long."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from jaxfp8rl.errors import ConfigError

ROWS, CHARACTERS = 50, 4000  # of a result that the model is shown
STEPS = 20_000_000  # of SQLite's virtual machine, a few seconds
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
REFUSED = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}


def sqlite_tool(file: str) -> Callable[[str], str]:
    """The tool `sqlite` over a database file. Raises ConfigError if there is none, or it is no database."""
    path = Path(os.path.expanduser(file))
    if not path.is_file():
        raise ConfigError(f'environment.tools: "sqlite:{file}": there is no such file',
                          "give the path of a database")
    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            connection.execute("SELECT name FROM sqlite_master").fetchone()
    except sqlite3.Error as e:
        raise ConfigError(f'environment.tools: "sqlite:{file}" cannot be read: {e}',
                          "give the path of a database") from e

    def sqlite(query: str) -> str:
        """Read from the database with a query in SQL.

        query: one SELECT of SQLite
        """
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            connection.set_authorizer(_authorized)
            left = iter(range(STEPS // 10_000))
            connection.set_progress_handler(lambda: next(left, None) is None, 10_000)
            cursor = connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchmany(ROWS + 1)
        lines = [" | ".join(names), *(" | ".join(map(str, row)) for row in rows[:ROWS])]
        return "\n".join(lines + ["..."] * (len(rows) > ROWS))[:CHARACTERS]

    return sqlite


def _authorized(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    refused = action == sqlite3.SQLITE_FUNCTION and second in REFUSED
    return sqlite3.SQLITE_OK if action in ALLOWED and not refused else sqlite3.SQLITE_DENY
