"""A program's line to its coordinator over HTTP.

Invariant (I6): ``fetch_object`` stores no chunk that was not compared with the manifest, and asks for none that is
there already, so what an earlier try or a relay left is continued. Retrying is the caller's business.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Self

import msgspec
from blake3 import blake3

from echo2.durable import write_file
from echo2.errors import IntegrityError, TransportError, Unauthorised
from echo2.transport.assets import check_asset
from echo2.transport.codec import Busy, Received, decode_reply, encode, tag_of, waiting_time
from echo2.transport.credential import load_credential, store_credential
from echo2.transport.join import JoinString
from echo2.transport.messages import PROTOCOL_VERSION, AssetFile, Enrol, Enrolled, Reply, Request, RequestBatch
from echo2.transport.partial import ObjectDescription, ObjectFile, missing_runs
from echo2.transport.wire import Deadlines, Wire
from echo2.version import VERSION

MAX_REPLY_BYTES = 48 * 1024 * 1024
"""Any reply but a batch; a signed manifest is the largest of them."""
MAX_BATCH_BYTES = 1 << 30
"""2,048 trajectories of 8,192 tokens with log-probs and versions are 200 MB."""
PIECE_S = 15.0
"""A download asks for about so much at a time, so that the coordinator's slots go round."""
BLOCK_BYTES = 1024 * 1024
"""Unit of reading, verifying and writing."""
FIRST_PIECE_BYTES = 8 * 1024 * 1024
MAX_PIECE_BYTES = 64 * 1024 * 1024
BUSY_PAUSE_S = 2.0
"""Mean pause before asking again when the coordinator serves as many downloads as it allows; jittered (H09)."""


class HttpTransport:
    """Transport and SnapshotSink of one enrolled program, and its downloads. Close it in the loop that used it."""

    def __init__(
        self,
        join: JoinString,
        credential_path: Path,
        deadlines: Deadlines = Deadlines(),  # noqa: B008
        usd_per_h: float | None = None,
    ) -> None:
        """usd_per_h: what a worker costs, told once, when it enrols; None leaves it to the run's configuration."""
        self._join = join
        self._usd_per_h = usd_per_h
        self._credential_path = credential_path
        self._deadlines = deadlines
        self._wire = Wire(join, deadlines)
        self._enrolled = load_credential(credential_path, join)
        if self._enrolled is not None:
            self._wire.present(self._enrolled.credential)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._wire.close()

    async def enrol(self, name: str) -> Enrolled:
        """Exchange the join token for a credential, or reuse the one an earlier life stored.

        Raises Unauthorised for a wrong or used-up token, UserError for a CA other than the pinned one, TransportError.
        """
        if self._enrolled is None:
            request = Enrol(self._join.token, name, PROTOCOL_VERSION, VERSION, self._usd_per_h)
            reply = await self.call(request)
            assert isinstance(reply, Enrolled)
            await asyncio.to_thread(store_credential, self._credential_path, self._join, reply)
            self._enrolled = reply
            self._wire.present(reply.credential)
        return self._enrolled

    async def call(self, request: Request) -> Reply:
        """Raises TransportError when no answer came in time; Refused, Unauthorised, Fenced when it was no."""
        if self._enrolled is None and not isinstance(request, Enrol):
            raise Unauthorised("this program has not enrolled; enrol first")
        cap = MAX_BATCH_BYTES if isinstance(request, RequestBatch) else MAX_REPLY_BYTES
        path = f"/v1/{tag_of(type(request))}"
        body = await self._wire.exchange("POST", path, encode(request), cap=cap, wait_s=waiting_time(request))
        return decode_reply(type(request), body)

    async def fetch_object(self, manifest: ObjectDescription, file: ObjectFile) -> None:
        """Bring the object's chunks that ``file`` lacks, and make the file durable.

        Raises TransportError, Refused when the object is no longer on the shelf (ask for the current path),
        IntegrityError for wrong bytes (nothing of them is kept), DiskFull; right chunks stay in the file.
        """
        lacking = sum(len(run) for run in missing_runs(file, len(manifest.chunks), len(manifest.chunks)))
        try:
            async with asyncio.timeout(self._deadlines.transfer_s(lacking * manifest.chunk_size)):
                await self._fetch_missing(manifest, file)
        except TimeoutError:
            raise TransportError(
                f"an object of {manifest.policy} must come faster than {self._deadlines.min_rate_bytes_per_s:.0f} "
                "bytes/s; what is here will be continued"
            ) from None
        await asyncio.to_thread(file.seal)

    async def fetch_asset(self, name: str, size: int, blake3: str, into: Path) -> Path:
        """Bring one small file to ``into``/``name``. Raises Malformed for an unfit name, IntegrityError, DiskFull."""
        asset = AssetFile(name, size, blake3)
        check_asset(asset)
        path = into / name
        if await asyncio.to_thread(_is_asset, path, asset):
            return path
        data = await self._wire.exchange("GET", f"/v1/assets/{name}", cap=size)
        if len(data) != size or _hash(data) != asset.blake3:
            raise IntegrityError(f"asset {name} must have {size} bytes of hash {asset.blake3[:16]}…, got other bytes")
        await asyncio.to_thread(_write_asset, path, data)
        return path

    async def upload(self, manifest: ObjectDescription, path: Path, start: int) -> None:
        """Send the object's bytes from offset ``start``, which is what the reply to the offer said."""
        piece_bytes = _whole_chunks(FIRST_PIECE_BYTES, manifest.chunk_size) * manifest.chunk_size
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY)
        try:
            while start < manifest.object_size:
                piece = await asyncio.to_thread(os.pread, descriptor, piece_bytes, start)
                target = f"{_object_path(manifest)}?offset={start}"
                reply = await self._wire.exchange("PUT", target, piece, cap=1024)
                received = msgspec.msgpack.decode(reply, type=Received).received_bytes
                if received <= start:
                    raise TransportError(f"the upload of an object of {manifest.policy} makes no progress at {start}")
                start = received
        finally:
            os.close(descriptor)

    async def upload_asset(self, name: str, path: Path) -> None:
        """Send one small file."""
        data = await asyncio.to_thread(path.read_bytes)
        asset = AssetFile(name, len(data), _hash(data))
        check_asset(asset)
        await self._wire.exchange("PUT", f"/v1/assets/{name}?blake3={asset.blake3}", data, cap=1024)

    async def _fetch_missing(self, manifest: ObjectDescription, file: ObjectFile) -> None:
        loop = asyncio.get_running_loop()
        most = _whole_chunks(FIRST_PIECE_BYTES, manifest.chunk_size)
        while (run := next(missing_runs(file, len(manifest.chunks), most), None)) is not None:
            began = loop.time()
            try:
                await self._fetch_run(manifest, file, run)
            except Busy:
                await asyncio.sleep(random.uniform(0.5, 1.5) * BUSY_PAUSE_S)
                continue
            rate = len(run) * manifest.chunk_size / max(loop.time() - began, 1e-3)
            most = _whole_chunks(min(rate * PIECE_S, MAX_PIECE_BYTES), manifest.chunk_size)

    async def _fetch_run(self, manifest: ObjectDescription, file: ObjectFile, run: range) -> None:
        """Neighbouring chunks in one answer, block by block."""
        first = run.start * manifest.chunk_size
        end = min(run.stop * manifest.chunk_size, manifest.object_size)
        wanted = {"Range": f"bytes={first}-{end - 1}"}
        async with self._wire.answer("GET", _object_path(manifest), headers=wanted) as response:
            told = response.headers.get("Content-Range", "")
            if response.status != 206 or told != f"bytes {first}-{end - 1}/{manifest.object_size}":
                raise IntegrityError(f"object of {manifest.policy}: asked for {wanted['Range']}, got {told[:80]!r}")
            step = _whole_chunks(BLOCK_BYTES, manifest.chunk_size)
            for number in range(run.start, run.stop, step):
                length = min((number + step) * manifest.chunk_size, end) - number * manifest.chunk_size
                block = await self._wire.read(response, length)
                if len(block) < length:
                    raise TransportError(
                        f"object of {manifest.policy}: the answer ended {length - len(block)} bytes early"
                    )
                await asyncio.to_thread(_store, manifest, file, number, block)


def _object_path(manifest: ObjectDescription) -> str:
    return f"/v1/objects/{manifest.object_root}"


def _whole_chunks(nbytes: float, chunk_size: int) -> int:
    """At least one chunk, else how many chunks fit into ``nbytes``."""
    return max(int(nbytes) // chunk_size, 1)


def _store(manifest: ObjectDescription, file: ObjectFile, first: int, block: bytes) -> None:
    """The chunks of ``block``, from number ``first`` on. Raises IntegrityError at the first wrong one."""
    view = memoryview(block)
    for number in range(first, first - (-len(view) // manifest.chunk_size)):
        chunk, view = view[: manifest.chunk_size], view[manifest.chunk_size :]
        if not file.right(number, chunk):
            raise IntegrityError(f"object of {manifest.policy}: chunk {number} is not what the manifest says")
        file.put(number, chunk)


def _write_asset(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def _is_asset(path: Path, asset: AssetFile) -> bool:
    return path.is_file() and path.stat().st_size == asset.size and _hash(path.read_bytes()) == asset.blake3


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
