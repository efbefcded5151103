"""Where errors become exit codes.

Invariant: a user's mistake ends with exit code 2 and one line per fault, anything else with exit code 1, one line and
the place of the full story; nobody sees a traceback who did not ask for one. Standard output stays untouched.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from echo2.errors import ConfigError, Echo2Error, SetAside, Unauthorised, UserError, first_cause
from echo2.shell import LIFELINE_VARIABLE

_UsageError = typer.BadParameter.__base__ or typer.BadParameter
"""Typer's root of usage errors; it has carried its own copy of click, so click's class would not do."""

_INTERRUPTED = 130
"""What typer makes of Ctrl-C."""

_log_folders: list[Path] = []


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Unexpected errors inside are written to ``folder`` (a run's ``logs``) instead of the temporary directory."""
    _log_folders.append(folder)  # left in place by an error, for the boundary to find; emptied by the next run
    yield
    _log_folders.pop()


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    command = typer.main.get_command(app)
    _log_folders.clear()
    debug = "--debug" in arguments or os.environ.get("ECHO2_DEBUG", "") not in ("", "0")
    try:
        code = command.main(args=list(arguments), prog_name="echo2", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", 1)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except SystemExit as error:
        return _say(f"the program was ended in its midst by sys.exit({error.code!r}) in code that it called", 1)
    except BaseException as error:
        if debug:
            traceback.print_exc()
        return _explain(error)
    if code == _INTERRUPTED:
        return _say("interrupted", 1)
    return code if isinstance(code, int) else 0


def _explain(error: BaseException) -> int:
    if isinstance(error, BaseExceptionGroup):
        error = first_cause(error)
    if isinstance(error, ConfigError):
        return max(_say(fault, 2) for fault in error.faults)
    if isinstance(error, UserError | Unauthorised) and not isinstance(error, SetAside):
        return _say(str(error), 2)
    if isinstance(error, _UsageError):
        return _say(_usage(error), 2)
    if isinstance(error, Echo2Error):
        return _say(str(error) or type(error).__name__, 1)  # Its sentence is the whole story.
    return _say(f"{type(error).__name__}: {error}{_story(error)}", 1)


def _story(error: BaseException) -> str:
    """Put the traceback where it is found; say where."""
    if os.environ.get(LIFELINE_VARIABLE) == "1":
        traceback.print_exception(error)  # standard error is this program's log
        return ""
    return f" (details in {_write_log(error)}; ECHO2_DEBUG=1 shows them)"


def _usage(error: BaseException) -> str:
    format_message = getattr(error, "format_message", None)
    message = str(format_message() if format_message else error).strip()
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path} --help)" if context else message


def _say(message: str, code: int) -> int:
    print("echo2: " + " ".join(message.split()), file=sys.stderr)
    return code


def _write_log(error: BaseException) -> Path:
    """Keep the traceback on disk; return where."""
    folder = _log_folders[-1] if _log_folders and _log_folders[-1].is_dir() else Path(tempfile.gettempdir())
    path = folder / f"echo2-error-{os.getpid()}.log"
    try:
        with path.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError as full:
        return Path(f"no log: {path} could not be written, {full.strerror}")
    return path
