from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.transport.join import ENVIRONMENT_KEY, JoinString, read_join

CA = "ab" * 32


@settings(max_examples=50)
@given(
    token=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    address=st.sampled_from(["10.0.0.1", "::1", "learner.example.org"]),
    port=st.integers(1, 65535),
    ca=st.sampled_from([None, CA]),
)
def test_a_join_string_reads_back(token: str, address: str, port: int, ca: str | None) -> None:
    join = JoinString(address, port, True, token, ca)
    assert JoinString.parse(str(join)) == join


def test_the_token_shows_only_where_the_string_itself_is_asked_for() -> None:
    join = JoinString("h", 1, True, "s3cret", CA)
    assert "s3cret" in str(join)
    assert "s3cret" not in repr(join)
    assert "s3cret" not in join.url


@pytest.mark.parametrize(
    "text",
    [
        "http://s3cret@h:1",
        "echo2://s3cret@h",
        "echo2://s3cret@h:0",
        "echo2://s3cret@h:99999",
        "echo2://s3cret@h:x",
        "echo2://h:1",
        "echo2://s3cret:pass@h:1",
        "echo2://s3cret@h:1/path",
        "echo2://s3cret@h:1?tls=2",
        "echo2://s3cret@h:1?ca=12",
        "echo2://s3cret@h:1?colour=red",
        "echo2://s3cret@h:1?ca",
        "echo2://s3cret@[::1:1",
        "echo2://s3cret@h h:1",
        "echo2://s3cret@h:1?" + "x" * 5000,
    ],
)
def test_a_wrong_join_string_is_the_users_mistake_and_its_token_is_not_repeated(text: str) -> None:
    with pytest.raises(UserError, match="join string") as caught:
        JoinString.parse(text)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_join_string_comes_from_argument_file_or_environment(tmp_path: Path) -> None:
    join = JoinString("h", 1, True, "t", CA)
    path = tmp_path / "join"
    path.write_text(f"{join}\n")
    for argument in (str(join), f"@{path}", str(path)):
        assert read_join(argument, {}) == join
    assert read_join(None, {ENVIRONMENT_KEY: str(join)}) == join
    assert read_join(None, {ENVIRONMENT_KEY: f"@{path}"}) == join


@pytest.mark.parametrize("argument", [None, "", "echo://s3cret@h:1", "@/absent/s3cret", "s3cret\0"])
def test_neither_string_nor_file_is_the_users_mistake_and_is_not_repeated(argument: str | None) -> None:
    with pytest.raises(UserError) as caught:
        read_join(argument, {})
    assert "s3cret" not in str(caught.value)


def test_a_mistyped_path_is_told_from_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing of that name exists"):
        read_join(str(tmp_path / "absent"), {})
    with pytest.raises(UserError, match=r"readable file or run folder$"):
        read_join(str(tmp_path), {})
