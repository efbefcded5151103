"""Join tokens and credentials.

Invariant (I9, PROTOCOL §8): a join token only enrols; it expires, has a use count and can be revoked. Secrets are kept
as hashes: whoever reads the store can impersonate nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from blake3 import blake3

from echo2.coordinator.operations import Operation, Peer, PeerPut, Token, TokenPut
from echo2.errors import Refused, Unauthorised
from echo2.ports import Ids
from echo2.transport.messages import PROTOCOL_VERSION, Enrol, Principal, Role


class Registry:
    """Tokens and peers, by the hash of their secrets."""

    def __init__(self, tokens: Iterable[Token], peers: Iterable[Peer]) -> None:
        self._tokens = {token.digest: token for token in tokens}
        self._peers = {peer.digest: peer for peer in peers}
        self._by_id = {peer.peer_id: peer for peer in self._peers.values()}

    def issue_token(
        self, secret: str, role: Role, expires_wall: float, uses: int, machine_id: str = ""
    ) -> list[Operation]:
        token = Token(digest(secret), role, expires_wall, uses, machine_id)
        self._tokens[token.digest] = token
        return [TokenPut(token)]

    def revoke_tokens(self, role: Role) -> list[Operation]:
        """No token that people have of this role enrols anybody any more; who is enrolled stays."""
        found = [token for token in self._tokens.values() if token.role is role and not token.machine_id]
        revoked = [msgspec.structs.replace(token, uses_left=0) for token in found]
        self._tokens.update((token.digest, token) for token in revoked)
        return [TokenPut(token) for token in revoked]

    def knows_token(self, secret: str) -> bool:
        return digest(secret) in self._tokens

    def enrol(self, request: Enrol, ids: Ids, wall: float, package_version: str) -> tuple[Peer, str, list[Operation]]:
        """A new peer, its credential and what to make durable. Raises Unauthorised or Refused with the reason."""
        token = self._tokens.get(digest(request.token))
        if token is None or token.uses_left <= 0:
            raise Unauthorised("the join token is unknown, revoked or used up: ask for a new join string")
        if wall > token.expires_wall:
            raise Unauthorised("the join token has expired: ask for a new join string")
        if request.protocol_version != PROTOCOL_VERSION or not _compatible(request.package_version, package_version):
            raise Refused(
                f"this run speaks protocol {PROTOCOL_VERSION} of echo2 {package_version}, the joining program protocol "
                f"{request.protocol_version} of {request.package_version}: install the same version"
            )
        credential = ids.new("key")
        name, peer_id = token.machine_id or _readable(request.name), ids.new(token.role.value)
        peer = Peer(
            peer_id, name, token.role, digest(credential), machine_id=token.machine_id, usd_per_h=request.usd_per_h
        )
        token = msgspec.structs.replace(token, uses_left=token.uses_left - 1)
        self._tokens[token.digest] = token
        self._peers[peer.digest] = peer
        self._by_id[peer.peer_id] = peer
        return peer, credential, [TokenPut(token), PeerPut(peer)]

    def authenticate(self, credential: str) -> Principal:
        """Who holds this credential. Raises Unauthorised."""
        peer = self._peers.get(digest(credential))
        if peer is None or peer.revoked:
            raise Unauthorised("the credential is unknown or revoked: enrol again with a join string of this run")
        return Principal(peer.role, peer.peer_id)

    def peer(self, peer_id: str) -> Peer:
        """Who is enrolled under this id; in simulation workers need not be."""
        return self._by_id.get(peer_id) or Peer(peer_id, peer_id, Role.WORKER, "")


def check_tasks(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises Refused when a worker would ask or score otherwise than this run does."""
    differing = sorted(name for name, fingerprint in theirs.items() if ours.get(name, fingerprint) != fingerprint)
    if differing:
        raise Refused(
            f"task {', '.join(differing)} differs on this worker from the run's: install the same version of its code "
            "and give it the same data"
        )


def _readable(name: str) -> str:
    """A name as it may appear on terminals and in logs of others: short, and without control characters."""
    return "".join(character if character.isprintable() else "?" for character in name[:64])


def digest(secret: str) -> str:
    return blake3(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _compatible(theirs: str, ours: str) -> bool:
    """Before 1.0 a minor version may change messages."""
    return theirs.split(".")[:2] == ours.split(".")[:2]
