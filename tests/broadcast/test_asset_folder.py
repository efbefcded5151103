from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from echo2.broadcast.asset_folder import AssetFolder
from echo2.errors import IntegrityError, Malformed
from echo2.transport.messages import AssetFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "assets"


def asset(name: str, data: bytes = b"{}") -> AssetFile:
    return AssetFile(name, len(data), blake3(data).hexdigest())


def test_assets_are_missing_until_their_bytes_are_right(folder: Path) -> None:
    files = AssetFolder(folder)
    wanted = [asset("config.json"), asset("tokenizer.json", b"[1]")]
    assert files.missing(wanted) == ("config.json", "tokenizer.json")
    with pytest.raises(IntegrityError):
        files.write(wanted[0], b"[]")
    files.write(wanted[0], b"{}")
    assert files.missing(wanted) == ("tokenizer.json",)
    path = files.path("config.json")
    assert path is not None
    assert path.read_bytes() == b"{}"
    assert AssetFolder(folder).missing([asset("config.json", b"new")]) == ("config.json",)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../b", "a\0b", "a\\b", "", ".", "..", ".hidden", "x" * 200]
)
def test_e03_an_asset_name_that_is_a_path_is_refused_before_anything_is_opened(name: str, folder: Path) -> None:
    files = AssetFolder(folder)
    with pytest.raises(Malformed):
        files.missing([asset(name)])
    with pytest.raises(Malformed):
        files.write(asset(name), b"{}")
    assert files.path(name) is None
    assert list(folder.iterdir()) == []


def test_assets_have_a_largest_size_and_a_largest_number(folder: Path) -> None:
    files = AssetFolder(folder)
    with pytest.raises(Malformed, match="at most"):
        files.missing([AssetFile("big", 1 << 40, "0" * 64)])
    with pytest.raises(Malformed, match="at most 64"):
        files.missing([asset(f"a{i}") for i in range(65)])


def test_e03_a_link_in_the_folder_is_no_asset_and_is_replaced_not_followed(folder: Path, tmp_path: Path) -> None:
    files, secret = AssetFolder(folder), tmp_path / "secret"
    secret.write_bytes(b"{}")
    (folder / "config.json").symlink_to(secret)
    assert files.path("config.json") is None
    assert files.missing([asset("config.json")]) == ("config.json",)
    files.write(asset("config.json", b"[]"), b"[]")
    assert secret.read_bytes() == b"{}"
    assert files.path("config.json") == folder / "config.json"
