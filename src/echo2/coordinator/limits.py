"""How much one caller may cost.

Invariant (I9): every request has a bound on its size, its duration and its rate that is known before its body is read.
Pure: the clock's reading comes as a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from echo2.transport.messages import Attach, Enrol, OfferSnapshot, ReportStep, Request, SubmitGroup
from echo2.transport.progress import SLOWEST_BYTES_PER_S, Progress


class Limits(msgspec.Struct, frozen=True):
    max_submit_bytes: int = 64 * 1024 * 1024
    """Largest submission of a group (``coordinator.max_submit_bytes``)."""
    header_s: float = 20.0
    """For a request's headers to be complete, and for a fresh connection to send any."""
    stall_s: float = 20.0
    """So far a body or an answer may fall behind the slowest rate, whatever its size (H01)."""
    handle_s: float = 60.0
    """For the coordinator to answer, beyond the wait that a long poll asks for."""
    min_rate_bytes_per_s: float = SLOWEST_BYTES_PER_S
    """Slowest transfer in either direction that counts as progress."""
    requests_per_s: float = 50.0
    """Sustained requests of one credential; a worker needs about two."""
    request_burst: float = 200.0
    """Requests of one credential that may come at once, after a reconnect for example."""
    strangers_per_s: float = 5.0
    """Sustained enrolments, and refused credentials, of one address."""
    stranger_burst: float = 100.0
    """Workers behind one router that may enrol at the same moment."""
    downloads: int = 8
    """Snapshot downloads served at the same time, whatever the number of workers (H09)."""
    downloads_per_peer: int = 2
    """…and of one credential."""
    download_wait_s: float = 15.0
    """How long a download queues before it is told to come back."""

    def body_cap(self, kind: type[Request]) -> int:
        """Largest body of a message of this kind, bytes."""
        caps: dict[type[Request], int] = {
            Enrol: 4 * 1024,
            SubmitGroup: self.max_submit_bytes,
            Attach: 1024 * 1024,
            ReportStep: 1024 * 1024,
            OfferSnapshot: 33 * 1024 * 1024,  # a manifest at its own limit, and the frame
        }
        return caps.get(kind, 256 * 1024)

    def progress(self, now_s: float) -> Progress:
        """Of a body or an answer that begins now."""
        return Progress(self.stall_s, self.min_rate_bytes_per_s, now_s)


@dataclass
class _Bucket:
    tokens: float
    at_s: float


class TokenBuckets:
    """One bucket per caller: ``rate`` tokens per second, at most ``burst``; a request takes one."""

    MOST_CALLERS = 4096
    """Buckets kept; beyond it the full ones are forgotten, which changes nothing for their owners, and the oldest."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, caller: str, now_s: float) -> float:
        """0 when the caller may go on (and a token is taken), else seconds until it may."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            self._make_room(now_s)
            bucket = self._buckets[caller] = _Bucket(self._burst, now_s)
        bucket.tokens = self._level(bucket, now_s)
        bucket.at_s = max(bucket.at_s, now_s)
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self._rate_per_s
        bucket.tokens -= 1
        return 0.0

    def _level(self, bucket: _Bucket, now_s: float) -> float:
        return min(self._burst, bucket.tokens + max(0.0, now_s - bucket.at_s) * self._rate_per_s)

    def _make_room(self, now_s: float) -> None:
        if len(self._buckets) < self.MOST_CALLERS:
            return
        lately = {c: b for c, b in self._buckets.items() if self._level(b, now_s) < self._burst}
        newest = list(lately.items())[-self.MOST_CALLERS // 2 :]
        self._buckets = dict(newest)
