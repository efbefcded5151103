"""A libtorrent session as a process: the baseline's node.

Invariant: TCP only, peers only as told (no DHT, no local discovery, no tracker, no exchange of peers), default settings
otherwise; the process ends with its standard input.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from typing import Any

import libtorrent as lt
import msgspec

PORT = 6881
PIECE_BYTES = 256 * 1024
_LENGTH = struct.Struct("!I")
_PROGRESS_EVERY_MS = 200


class Node:
    """Consumes orders ``listen``, ``add``, ``connect`` and ``forget``; says ``ready``, ``whole`` and ``progress``."""

    def __init__(self, address: str) -> None:
        self._session = lt.session(_settings(address))
        self._added: Any = None
        self._torrent: Any = None
        """The one that was added, while it is not whole."""

    def obey(self, order: dict[str, Any]) -> None:
        match order["type"]:
            case "add":
                parameters = lt.add_torrent_params()
                parameters.ti = lt.torrent_info(order["torrent"])
                parameters.save_path = order["folder"]
                parameters.flags &= ~(lt.torrent_flags.paused | lt.torrent_flags.auto_managed)
                parameters.flags |= lt.torrent_flags.disable_pex
                if order["is_seed"]:
                    parameters.flags |= lt.torrent_flags.seed_mode
                self._added = self._session.add_torrent(parameters)
                self._torrent = None if order["is_seed"] else self._added
                _say({"type": "ready"})
            case "connect":
                for address in order["addresses"]:
                    self._added.connect_peer((address, PORT))
            case "forget":
                self._torrent = None
                self._session.remove_torrent(self._added)

    def watch(self) -> None:
        """Say how far it is; wakes at once when it is whole."""
        while True:
            self._session.wait_for_alert(_PROGRESS_EVERY_MS)
            self._session.pop_alerts()
            torrent = self._torrent
            if torrent is None:
                continue
            status = torrent.status()
            if status.is_seeding:
                self._torrent = None
                _say({"type": "whole"})
            else:
                _say({"type": "progress", "share": status.progress})


def serve() -> None:
    """Until standard input ends."""
    pipe = sys.stdin.buffer
    node: Node | None = None
    while head := pipe.read(_LENGTH.size):
        order = msgspec.msgpack.decode(pipe.read(*_LENGTH.unpack(head)))
        if node is None:
            node = Node(order["address"])
            threading.Thread(target=node.watch, daemon=True).start()
        else:
            node.obey(order)
    os._exit(0)


def make_torrent(path: str) -> bytes:
    """Version 1 metadata of one file; every piece is hashed here, before anything is timed."""
    files = lt.list_files(path)
    creator = lt.create_torrent(files, PIECE_BYTES, lt.create_torrent.v1_only)
    lt.set_piece_hashes(creator, os.path.dirname(path))
    return bytes(lt.bencode(creator.generate()))


def _settings(address: str) -> Any:
    return {
        "listen_interfaces": f"{address}:{PORT}",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_outgoing_utp": False,
        "enable_incoming_utp": False,
        "out_enc_policy": int(lt.enc_policy.pe_disabled),
        "in_enc_policy": int(lt.enc_policy.pe_disabled),
        "alert_mask": lt.alert.category_t.status_notification | lt.alert.category_t.error_notification,
    }


def _say(word: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(word)
    sys.stdout.buffer.write(_LENGTH.pack(len(body)) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
