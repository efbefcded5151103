"""Join tokens only enrol; credentials are hashes at rest (PROTOCOL §8)."""

from __future__ import annotations

import msgspec
import pytest

from echo2.coordinator.enrolment import Registry, check_tasks, digest
from echo2.coordinator.operations import PeerPut, TokenPut
from echo2.errors import Refused, Unauthorised
from echo2.transport.messages import PROTOCOL_VERSION, Enrol, Role


class CountedIds:
    def __init__(self) -> None:
        self.count = 0

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"


def registry(role: Role = Role.WORKER, expires: float = 100.0, uses: int = 2) -> Registry:
    found = Registry([], [])
    found.issue_token("secret", role, expires, uses)
    return found


def enrol(token: str = "secret", version: str = "0.1.0", protocol: int = PROTOCOL_VERSION) -> Enrol:
    return Enrol(token, "worker one", protocol, version)


def test_an_enrolled_peer_is_recognised_by_its_credential_alone() -> None:
    found = registry()
    peer, credential, operations = found.enrol(enrol(), CountedIds(), 0.0, "0.1.0")
    principal = found.authenticate(credential)
    assert (principal.role, principal.peer_id) == (Role.WORKER, peer.peer_id)
    assert [type(operation) for operation in operations] == [TokenPut, PeerPut]
    assert found.peer(peer.peer_id).name == "worker one"


@pytest.mark.parametrize(
    ("request_", "wall", "sentence"),
    [
        (enrol("wrong"), 0.0, "unknown"),
        (enrol(), 101.0, "expired"),
        (enrol(version="0.2.0"), 0.0, "install the same version"),
        (enrol(protocol=99), 0.0, "install the same version"),
    ],
)
def test_a_bad_enrolment_is_refused_with_its_reason(request_: Enrol, wall: float, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        registry().enrol(request_, CountedIds(), wall, "0.1.0")


def test_a_token_is_used_up_and_stays_so_after_a_restart() -> None:
    found, ids = registry(uses=1), CountedIds()
    _, credential, operations = found.enrol(enrol(), ids, 0.0, "0.1.0")
    again = Registry(
        [o.token for o in operations if isinstance(o, TokenPut)], [o.peer for o in operations if isinstance(o, PeerPut)]
    )
    with pytest.raises(Unauthorised, match="used up"):
        again.enrol(enrol(), ids, 0.0, "0.1.0")
    assert again.authenticate(credential).role is Role.WORKER


def test_neither_tokens_nor_credentials_are_kept_in_clear() -> None:
    found = registry()
    _, credential, operations = found.enrol(enrol(), CountedIds(), 0.0, "0.1.0")
    kept = msgspec.msgpack.encode(operations)
    assert credential.encode() not in kept
    assert b"secret" not in kept


def test_a_join_token_and_a_revoked_peer_open_nothing() -> None:
    found = registry()
    with pytest.raises(Unauthorised):
        found.authenticate("secret")
    peer, credential, _ = found.enrol(enrol(), CountedIds(), 0.0, "0.1.0")
    revoked = Registry([], [msgspec.structs.replace(peer, revoked=True)])
    with pytest.raises(Unauthorised, match="revoked"):
        revoked.authenticate(credential)
    assert digest(credential) == peer.digest


def test_revoked_tokens_enrol_nobody_and_the_enrolled_stay() -> None:
    found = registry()
    _, credential, _ = found.enrol(enrol(), CountedIds(), 0.0, "0.1.0")
    found.revoke_tokens(Role.WORKER)
    with pytest.raises(Unauthorised, match="revoked"):
        found.enrol(enrol(), CountedIds(), 0.0, "0.1.0")
    assert found.authenticate(credential).role is Role.WORKER


def test_a_worker_whose_task_differs_is_refused_by_name() -> None:
    check_tasks({"math": "a"}, {"math": "a"})
    with pytest.raises(Refused, match="task math differs"):
        check_tasks({"math": "a"}, {"math": "b"})


def test_a_name_with_control_characters_is_made_readable() -> None:
    request = Enrol("secret", "evil\x1b[2J\nworker", PROTOCOL_VERSION, "0.1.0")
    peer, _, _ = registry().enrol(request, CountedIds(), 0.0, "0.1.0")
    assert peer.name == "evil?[2J?worker"
