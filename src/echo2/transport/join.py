"""The one string that lets a program join a run.

Invariant: the token inside appears where the string itself is asked for and nowhere else: not in ``repr``, not in an
error, not in a traceback. ``echo2://TOKEN@HOST:PORT?tls=1&ca=FINGERPRINT``
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from echo2.errors import UserError

ENVIRONMENT_KEY = "ECHO2_JOIN"
_FORM = "echo2://TOKEN@HOST:PORT?tls=1&ca=FINGERPRINT"
_MAX_CHARACTERS = 4096
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


class JoinString(msgspec.Struct, frozen=True):
    address: str
    """Host name or IP address of the coordinator."""
    port: int
    tls: bool
    token: str
    """Good for enrolment only; expires and can be revoked."""
    ca_fingerprint: str | None = None
    """SHA-256 of the run's CA certificate, hexadecimal; None: the system's authorities are trusted."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UserError, which never repeats any of ``text``."""
        text = text.strip()
        if len(text) > _MAX_CHARACTERS or not text.startswith("echo2://"):
            raise UserError(f"a join string has the form {_FORM}; copy the whole line that the run printed")
        try:
            parts = urlsplit(text)
            port = parts.port
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError:
            raise UserError(f"the join string's address or options cannot be read; its form is {_FORM}") from None
        if not parts.username or parts.password is not None or parts.path not in ("", "/") or parts.fragment:
            raise UserError(f"the join string must hold one token before the @ and no path; its form is {_FORM}")
        if not parts.hostname or not _HOST.fullmatch(parts.hostname) or not port:
            raise UserError(f"the join string must hold a host and a port from 1 to 65535; its form is {_FORM}")
        fingerprint = options.pop("ca", None)
        tls = options.pop("tls", "1")
        if options or tls not in ("0", "1") or (fingerprint is not None and not _FINGERPRINT.fullmatch(fingerprint)):
            raise UserError("the join string's options are tls=0 or tls=1 and ca= with 64 hexadecimal digits")
        return cls(parts.hostname, port, tls == "1", unquote(parts.username), fingerprint)

    @property
    def url(self) -> str:
        """Base URL without the token. Example: ``https://[::1]:8400``."""
        return f"{'https' if self.tls else 'http'}://{self._host}:{self.port}"

    @property
    def _host(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address

    def __str__(self) -> str:
        pin = f"&ca={self.ca_fingerprint}" if self.ca_fingerprint else ""
        return f"echo2://{quote(self.token, safe='')}@{self._host}:{self.port}?tls={int(self.tls)}{pin}"

    def __repr__(self) -> str:
        return f"JoinString({self.url!r}, token=…)"


def read_join(argument: str | None, environment: Mapping[str, str] = os.environ) -> JoinString:
    """From the string itself, ``@FILE``, a file's path, or, when nothing is given, the environment's ``ECHO2_JOIN``.

    Files and environment keep the token out of process lists and shell histories. Raises UserError.
    """
    text = environment.get(ENVIRONMENT_KEY, "") if argument is None else argument
    text = text.strip()
    if not text:
        raise UserError(f"a join string is needed: give it, a file that holds it, or set {ENVIRONMENT_KEY}")
    if text.startswith("echo2://"):
        return JoinString.parse(text)
    path = Path(text.removeprefix("@"))
    try:
        with path.open(encoding="utf-8") as file:
            return JoinString.parse(file.read(_MAX_CHARACTERS + 1))
    except (OSError, ValueError):
        # The argument may be a mistyped join string: it is not repeated.
        absent = "" if path.exists() else "; nothing of that name exists"
        raise UserError(
            f"the join argument is neither a string of the form {_FORM} nor a readable file or run folder{absent}"
        ) from None
