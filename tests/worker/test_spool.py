from __future__ import annotations

from pathlib import Path

import pytest

from echo2.errors import DiskFull
from echo2.worker.spool import DiskSpool


async def test_groups_survive_the_process_oldest_first(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path)
    for number in range(12):
        await spool.put(f"lease-{number}", b"%d" % number)
    await spool.remove("lease-3")
    again = DiskSpool(tmp_path)
    found = await again.pending()
    assert [lease for lease, _ in found] == [f"lease-{n}" for n in range(12) if n != 3]
    assert found[0] == ("lease-0", b"0")
    await again.put("lease-new", b"new")
    assert (await DiskSpool(tmp_path).pending())[-1] == ("lease-new", b"new")


async def test_a_lease_id_never_becomes_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = DiskSpool(folder)
    await spool.put("../../outside\0", b"x")
    assert [path.parent for path in tmp_path.rglob("*.group")] == [folder]
    assert await DiskSpool(folder).pending() == [("../../outside\0", b"x")]


async def test_torn_and_unreadable_files_are_set_aside(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path)
    await spool.put("good", b"x")
    (tmp_path / "0000000002.group").write_bytes(b"\xc1 not msgpack")
    (tmp_path / "0000000003.group.aside").write_bytes(b"torn")
    assert await DiskSpool(tmp_path).pending() == [("good", b"x")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000001.group", "0000000002.unreadable"]


async def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path, limit_bytes=200)
    await spool.put("first", b"x" * 100)
    with pytest.raises(DiskFull, match="must stay below 200 bytes"):
        await spool.put("second", b"x" * 150)
    assert [lease for lease, _ in await spool.pending()] == ["first"]
    await spool.remove("first")
    await spool.put("second", b"x" * 150)


async def test_removing_what_is_not_there_is_harmless(tmp_path: Path) -> None:
    await DiskSpool(tmp_path).remove("unknown")
