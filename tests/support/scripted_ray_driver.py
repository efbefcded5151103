"""The line of the ray pool to a cluster that is a folder: ``DIR/machines`` is what runs, ``DIR/nodes`` how many CPUs.

What an order's machine id begins with says what becomes of it: it ``dies`` (the process does, after carrying it out),
``hangs``, is ``refused``, or answers with ``babble``. Where ``DIR/unreachable`` is, nothing can be connected.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.ray_messages import Call, Connect, Found, Look, Reply, Start, Stop, encode, read_call
from echo2.provisioning.pools.ray_offers import Node

FOLDER = Path(sys.argv[1])
MACHINES = FOLDER / "machines"


def main() -> None:
    with (FOLDER / "lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    for line in sys.stdin.buffer:
        reply = answer(read_call(line))
        if reply is not None:
            sys.stdout.buffer.write(encode(reply))
            sys.stdout.buffer.flush()


def answer(call: Call) -> Reply | None:
    machines = {found.machine_id: found for found in msgspec.json.decode(MACHINES.read_bytes(), type=list[Found])}
    match call:
        case Connect(number, address, namespace):
            if (FOLDER / "unreachable").exists():
                return Reply(number=number, fault="unreachable", why=f"nobody at {address}")
            (FOLDER / "namespace").write_text(namespace)
            return Reply(number=number)
        case Start(number, duty):
            behaviour = duty.machine_id.partition("-")[0]
            if behaviour == "refused":
                return Reply(number=number, fault="refused", why="no such resource")
            found = Found(
                machine_id=duty.machine_id, offer=duty.offer, phase=Phase.ACTIVE, usd_per_h=duty.usd_per_h,
                age_s=100.0, node_id="one",
            )  # fmt: skip
            machines.setdefault(duty.machine_id, found)
            with (FOLDER / "joins").open("a") as joins:
                joins.write(f"{duty.machine_id} {duty.join}\n")
            keep(machines)
            if behaviour == "dies":
                os._exit(1)
            if behaviour == "hangs":
                time.sleep(60)
            if behaviour == "babble":
                print("this is no reply", flush=True)
            return Reply(number=number)
        case Stop(number, machine_id):
            machines.pop(machine_id, None)
            keep(machines)
            return Reply(number=number)
        case Look(number):
            cpus = float((FOLDER / "nodes").read_text())
            used = sum(found.phase is Phase.ACTIVE for found in machines.values())
            return Reply(
                number=number, machines=tuple(machines.values()), nodes=(Node("one", {"CPU": cpus}),),
                available={"CPU": cpus - used},
            )  # fmt: skip
    return None


def keep(machines: dict[str, Found]) -> None:
    MACHINES.write_bytes(msgspec.json.encode(list(machines.values())))


main()
