"""What other libraries write to standard error goes to a file of the run, and to the terminal only if the run
fails.

XLA, NCCL and CUDA write from C++ to file descriptor 2, so that is what is redirected: every thread and child
process is. Standard output stays as it is. A process that dies of a signal cannot print: a small process,
which waits for its end, prints the last lines in its place, and faulthandler writes to the terminal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxfp8rl.errors import UserError

VERBOSE = "JAXFP8RL_VERBOSE"  # an environment variable: anything but "" or "0" shows everything at once
FOLDER, LAST = "logs", 20
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING"}  # more than our bridge to vLLM asks for: it lands in the file
HEAD = "the last lines of other libraries before the end; all of them:"
# The arguments are the file and where this run's part begins in it. A run that ends by itself says a word.
WAIT = f"""
read -r word && exit 0
[ -n "$(tail -c +"$2" "$1" | head -c 1)" ] || exit 0
printf '%s\\n' "jaxfp8rl: {HEAD} $1"
tail -c +"$2" "$1" | tail -n {LAST}
"""
_kept: int | None = None  # a duplicate of the terminal's descriptor, while the output is redirected


@contextlib.contextmanager
def quiet(path: Path | None) -> Iterator[None]:
    """While entered, append standard error to the file `path`. After an exception its last lines are printed,
    unless the error is wrong input, an exit or an interruption. None: nothing is redirected, and so with the
    environment variable VERBOSE."""
    if path is None or active() or os.environ.get(VERBOSE, "") not in ("", "0"):
        yield
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log, _redirected(log.fileno()), _until_death(path, log.tell()) as goodbye:
        start = log.tell()
        try:
            yield
        except BaseException as e:
            goodbye()
            if not _expected(e):
                say(last_lines(path, start))
            raise
        goodbye()


def active() -> bool:
    """Whether standard error is redirected."""
    return _kept is not None


def say(text: str) -> None:
    """Print `text`, if it is not empty, where standard error went before it was redirected."""
    if text and _kept is not None and _is_descriptor_2():
        os.write(_kept, f"{text}\n".encode(errors="backslashreplace"))
    elif text:
        print(text, file=sys.stderr, flush=True)


def descriptor() -> int | None:
    """The file descriptor of the terminal's standard error; None for a process without one."""
    if _kept is not None:
        return _kept
    return sys.__stderr__.fileno() if sys.__stderr__ else None


def last_lines(path: Path, start: int) -> str:
    """The last lines of the file `path` from byte `start` on, under a heading; "" if there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 2**16))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError as e:  # the error to come says more than this one
        return f"jaxfp8rl: {path} cannot be read: {e.strerror}"
    return "\n".join([f"jaxfp8rl: {HEAD} {path}", *lines[-LAST:]]) if lines else ""


def _expected(e: BaseException) -> bool:
    """Whether other libraries have nothing to say about the end of the run."""
    wrong_input = isinstance(e, UserError) and e.exit_code == UserError.exit_code
    return wrong_input or isinstance(e, SystemExit | KeyboardInterrupt)


def _is_descriptor_2() -> bool:
    """Whether Python's standard error is that of the process, not one of a notebook or of a test."""
    try:
        return sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def _redirected(log: int) -> Iterator[None]:
    """Descriptor 2 is `log` while entered. Fatal signals and the exceptions of threads go to the terminal."""
    global _kept
    _kept, hook, ours = os.dup(2), threading.excepthook, not faulthandler.is_enabled()
    try:
        _flush()
        os.dup2(log, 2)
        if ours:
            faulthandler.enable(_kept)
        threading.excepthook = _thread_failed
        yield
    finally:
        threading.excepthook = hook
        if ours:
            faulthandler.disable()
        _flush()
        os.dup2(_kept, 2)
        os.close(_kept)
        _kept = None


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    if args.exc_type is not SystemExit:
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        say(f"Exception in thread {name}:\n{trace.rstrip()}")


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()


@contextlib.contextmanager
def _until_death(path: Path, start: int) -> Iterator:
    """Yield a function that says that this process ends by itself. Without that call, the last lines are
    printed when it is gone."""
    command = ["/bin/sh", "-c", WAIT, "sh", str(path), str(start + 1)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=_kept, stderr=_kept,
                               start_new_session=True)

    def goodbye() -> None:
        with contextlib.suppress(OSError, ValueError):
            watcher.communicate(b"done\n")

    try:
        yield goodbye
    finally:
        goodbye()
