from __future__ import annotations

import inspect
import math

import msgspec
import pytest

from echo2 import errors
from echo2.errors import Echo2Error, Malformed, Refused, TransportError
from echo2.transport.codec import Busy, decode_reply, decode_request, encode, error_of, status_of, tag_of
from echo2.transport.messages import (
    REPLY_OF,
    AckCheckpoint,
    Attach,
    AwaitPolicy,
    Heartbeat,
    HeartbeatReply,
    LeaseWait,
    PublishSnapshot,
    ReportStep,
    Request,
    RequestBatch,
    RequestLease,
    RowSubmission,
    SubmitGroup,
)
from echo2.types import Policy, RowStatus


def test_a_request_reads_back_with_records_as_they_were_sent() -> None:
    record = msgspec.msgpack.encode({"reward": 1.0, "field of a later version": [1]})
    row = RowSubmission(0, RowStatus.FINISHED, record=msgspec.Raw(record))
    read = decode_request("SubmitGroup", encode(SubmitGroup("lease", 1, 0, (row,))))
    assert isinstance(read, SubmitGroup)
    assert bytes(read.rows[0].record) == record


def test_every_request_has_a_tag_of_its_own() -> None:
    assert len({tag_of(kind) for kind in REPLY_OF}) == len(REPLY_OF)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Leave"}), b"\x91" * 100_000])
def test_bytes_that_are_no_heartbeat_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed, match="Heartbeat could not be read"):
        decode_request("Heartbeat", body)


def test_a_field_of_the_wrong_type_is_malformed() -> None:
    body = msgspec.msgpack.encode({"type": "Heartbeat", "installed": ["../v9", 1], "leases": []})
    with pytest.raises(Malformed, match="installed"):
        decode_request("Heartbeat", body)


def test_an_unknown_message_is_malformed() -> None:
    with pytest.raises(Malformed, match="no message of this protocol"):
        decode_request("Nonsense", encode(Heartbeat(None, ())))


@pytest.mark.parametrize("wait_s", [-1.0, 30.1, math.inf, math.nan])
def test_i7_a_wait_outside_its_bounds_is_malformed(wait_s: float) -> None:
    for request in (RequestLease(Policy(0, 0), wait_s), RequestBatch(1, 0, wait_s)):
        with pytest.raises(Malformed, match="wait_s"):
            decode_request(tag_of(type(request)), encode(request))


@pytest.mark.parametrize(
    "request_",
    [
        ReportStep(1, 0, math.nan, 0.0, {}),
        ReportStep(1, 0, math.inf, 0.0, {}),
        ReportStep(1, 0, -1.0, 0.0, {}),
        ReportStep(1, 0, 1.0, math.nan, {}),
        ReportStep(1, -1, 1.0, 0.0, {}),
        RequestBatch(1, 2**63, 0.0),
        AckCheckpoint(-1, 0),
        Attach("run", -5, "", "hash", (), rollback=True),
        PublishSnapshot(1, Policy(0, -1), "0" * 64),
        RequestLease(Policy(-1, -1), 0.0),
        Heartbeat(Policy(0, 2**53), ()),
        Heartbeat(None, (), spooled_groups=2**63),
        Heartbeat(None, (), generated_tokens=-1),
    ],
)
def test_a_number_that_no_honest_program_sends_is_malformed(request_: Request) -> None:
    """Taken in, it would end up in counts, in JSON that cannot be read back, or below the first step."""
    with pytest.raises(Malformed, match=r"Expected `(int|float)`"):
        decode_request(tag_of(type(request_)), encode(request_))


@pytest.mark.parametrize("name", ["", "../0.4/delta", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 64 + "\n"])
def test_e03_what_is_no_root_names_no_object(name: str) -> None:
    for request in (PublishSnapshot(1, Policy(0, 0), name), AwaitPolicy(None, 1.0, (), {name: 1})):
        with pytest.raises(Malformed):
            decode_request(tag_of(type(request)), encode(request))


def test_a_reply_is_one_of_those_its_request_can_have() -> None:
    assert decode_reply(RequestLease, encode(LeaseWait("gate"))) == LeaseWait("gate")
    with pytest.raises(Refused, match="one version"):
        decode_reply(RequestLease, encode(HeartbeatReply(False)))


def test_every_error_arrives_as_itself_or_as_a_reason_to_retry_or_a_refusal() -> None:
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, Echo2Error)]
    for kind in kinds:
        status, body = status_of(kind("why"))
        arrived = error_of(status, encode(body))
        assert isinstance(arrived, (Refused, TransportError, errors.IntegrityError))
        assert str(arrived) == "why"
        if issubclass(kind, (Refused, TransportError)):
            assert type(arrived) is kind
    status, body = status_of(Busy("later"))
    assert type(error_of(status, encode(body))) is Busy


def test_an_answer_from_something_else_is_still_an_error() -> None:
    assert isinstance(error_of(502, b"<html>"), TransportError)
    assert isinstance(error_of(404, b"<html>"), Refused)
