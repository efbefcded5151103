"""Messages as bytes and back.

Invariant (I9): decoding checks every field against the message's type before anything else sees it; what does not fit
is ``Malformed`` in one sentence. Nothing is ever evaluated or unpickled.
"""

from __future__ import annotations

import math
from functools import cache

import msgspec

from echo2.errors import (
    DiskFull,
    Echo2Error,
    Fenced,
    IntegrityError,
    Malformed,
    Refused,
    SetAside,
    Starved,
    TransportError,
    Unauthorised,
)
from echo2.transport.messages import (
    MAX_WAIT_S,
    REPLY_OF,
    AwaitPolicy,
    Reply,
    Request,
    RequestBatch,
    RequestLease,
)

_ENCODER = msgspec.msgpack.Encoder()
_KINDS: dict[str, type[Request]] = {kind.__name__: kind for kind in REPLY_OF}


class Busy(TransportError):
    """The coordinator serves as many downloads as it allows; ask again after a jittered pause (H09)."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What every answer other than 2xx carries."""

    error: str
    """Class name of the error, one of ``errors.py``."""
    message: str


class Received(msgspec.Struct, frozen=True):
    """Answer to a piece of an upload."""

    received_bytes: int


def tag_of(kind: type[Request]) -> str:
    """The last part of the request's path, ``/v1/<tag>``."""
    return kind.__name__


def request_kind(tag: str) -> type[Request]:
    """Raises Malformed for a tag that is no message of this protocol."""
    try:
        return _KINDS[tag]
    except KeyError:
        raise Malformed(f"{tag[:64]!r} is no message of this protocol; both ends must run the same version") from None


def encode(message: Request | Reply | ErrorBody | Received) -> bytes:
    return _ENCODER.encode(message)


def decode_request(tag: str, body: bytes) -> Request:
    """Raises Malformed for an unknown tag, a field that does not fit, or a wait outside [0, MAX_WAIT_S]."""
    kind = request_kind(tag)
    try:
        request: Request = _request_decoder(kind).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"{tag} could not be read: {error}") from None
    wait_s = waiting_time(request)
    if not (math.isfinite(wait_s) and 0 <= wait_s <= MAX_WAIT_S):
        raise Malformed(f"wait_s of {tag} must be in [0, {MAX_WAIT_S}], got {wait_s}")
    return request


def decode_reply(kind: type[Request], body: bytes) -> Reply:
    """The reply to a request of this kind. Raises Refused when it is something else: the versions differ."""
    try:
        return _reply_decoder(kind).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(
            f"the coordinator's reply to {tag_of(kind)} could not be read ({error}); both must run one version"
        ) from None


def waiting_time(request: Request) -> float:
    """Seconds the answer may be held back on purpose; 0 for every message that is no long poll."""
    return request.wait_s if isinstance(request, (AwaitPolicy, RequestLease, RequestBatch)) else 0.0


def error_of(status: int, body: bytes) -> Echo2Error:
    """The error that an answer other than 2xx stands for."""
    try:
        told = msgspec.msgpack.decode(body, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ErrorBody("", f"the coordinator answered HTTP {status}")
    known = {c.__name__: c for c in (Refused, Malformed, Unauthorised, SetAside, Fenced, IntegrityError)}
    if told.error in known and status < 500:
        return known[told.error](told.message)
    if told.error == Busy.__name__:
        return Busy(told.message)
    if status in (408, 425, 429) or status >= 500:
        return TransportError(told.message)
    return Refused(told.message)


def status_of(error: Echo2Error) -> tuple[int, ErrorBody]:
    """The HTTP status and body that say ``error`` to the other side; the inverse of ``error_of``."""
    statuses: tuple[tuple[type[Echo2Error], int], ...] = (
        (SetAside, 403),
        (Unauthorised, 401),
        (Fenced, 409),
        (Malformed, 400),
        (IntegrityError, 400),
        (Refused, 403),
        (DiskFull, 507),
        (Busy, 503),
        (Starved, 503),
        (TransportError, 503),
    )
    for kind, status in statuses:
        if isinstance(error, kind):
            return status, ErrorBody(kind.__name__, str(error))
    return 403, ErrorBody(Refused.__name__, str(error))


@cache
def _request_decoder(kind: type[Request]) -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _reply_decoder(kind: type[Request]) -> msgspec.msgpack.Decoder[Reply]:
    replies = REPLY_OF[kind]
    if not isinstance(replies, tuple):
        return msgspec.msgpack.Decoder(replies)
    union = replies[0]
    for other in replies[1:]:
        union = union | other  # type: ignore[assignment]
    return msgspec.msgpack.Decoder(union)
