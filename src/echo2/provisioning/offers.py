"""What can be rented: machines of one kind at one price, and what one of them costs a run per hour.

Invariant: every ``Offer`` has a positive price, a positive throughput and a count of at least one, however it was made;
a list of offers holds each name once. A throughput that nobody measured is marked ``estimated``.

The CSV form has the columns ``name,gpu,count,usd_per_h,rollouts_per_s`` and, optional, ``traffic_usd_per_gb,
uplink_mbps,downlink_mbps,min_rental_h,reliability``. Prices and rates are those of one machine; ``count`` is how many
such machines there are to rent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from echo2.errors import UserError
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.cells import BadCell, Quantity, shorten
from echo2.provisioning.table import Columns, Row, parse_table, read_file, refuse

MAX_FILE_BYTES = 16_000_000
"""Some 200,000 offers; a model file given by mistake is refused before it is read."""
BYTES_PER_GB = 1e9
_BITS_PER_MBIT = 1e6
_SMALLEST = 1e-9
"""Prices, rates and shares below this are mistakes of unit, and their quotients would overflow."""

QUANTITIES: Mapping[str, Quantity] = {
    "count": Quantity("machines", least=1, most=1e6, whole=True),
    "usd_per_h": Quantity("USD per hour", over=0.0, least=_SMALLEST),
    "rollouts_per_s": Quantity("trajectories per second", over=0.0, least=_SMALLEST),
    "traffic_usd_per_gb": Quantity("USD per GB", least=0.0),
    "uplink_mbps": Quantity("Mbps", over=0.0, least=_SMALLEST),
    "downlink_mbps": Quantity("Mbps", over=0.0, least=_SMALLEST),
    "min_rental_h": Quantity("hours", least=0.0),
    "reliability": Quantity("share of the time", over=0.0, least=_SMALLEST, most=1.0),
}

_TRAFFIC = Quantity("GB per hour", least=0.0)
_REQUIRED = ("name", "gpu", "count", "usd_per_h", "rollouts_per_s")
_COLUMNS = Columns(
    _REQUIRED,
    tuple(name for name in QUANTITIES if name not in _REQUIRED),
    meant={
        "price": "usd_per_h",
        "cost": "usd_per_h",
        "usd": "usd_per_h",
        "eur_per_h": "usd_per_h (convert the prices to USD)",
        "gbp_per_h": "usd_per_h (convert the prices to USD)",
        "throughput": "rollouts_per_s",
        "mu": "rollouts_per_s",
        "uplink_mb_s": "uplink_mbps (1 MB/s is 8 Mbps)",
        "downlink_mb_s": "downlink_mbps (1 MB/s is 8 Mbps)",
    },
)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that can be rented.

    Example: ``Offer(name="vast-5090", gpu="RTX5090", count=20, usd_per_h=0.5, rollouts_per_s=0.2)``.

    Raises UserError for a value outside its range.
    """

    name: str
    gpu: str
    count: int
    """Machines of this kind that can be rented."""
    usd_per_h: float
    """Of one machine."""
    rollouts_per_s: float
    """mu_i of one machine while it is up: rewarded trajectories that reach the buffer."""
    traffic_usd_per_gb: float = 0.0
    """Price of a GB (10⁹ bytes) received."""
    uplink_mbps: float | None = None
    downlink_mbps: float | None = None
    """None where it is not known."""
    min_rental_h: float = 0.0
    """Billed at least."""
    reliability: float = 1.0
    """Share of the rented time in which the machine is up."""
    estimated: bool = False
    """Nobody measured ``rollouts_per_s``; it was computed (provisioning.estimate)."""

    def __post_init__(self) -> None:
        for field, quantity in QUANTITIES.items():
            value = getattr(self, field)
            if value is not None and (fault := quantity.fault(value)):
                raise UserError(f"offer {shorten(self.name)}: {field} {fault}")

    @property
    def expected_rollouts_per_s(self) -> float:
        """mu_i over rented time: what one machine delivers, less the time in which it is down."""
        return self.rollouts_per_s * self.reliability


class Terms(msgspec.Struct, frozen=True):
    """What an offer's cost per hour depends on besides the offer."""

    received_gb_per_h: float = 0.0
    """GB a worker receives per hour: ``received_gb_per_h``."""
    rental_h: float = math.inf
    """How long machines are meant to be kept; a shorter time than an offer's minimum makes its hours dearer."""

    def __post_init__(self) -> None:
        if fault := _TRAFFIC.fault(self.received_gb_per_h):
            raise UserError(f"received_gb_per_h {fault}")
        if not self.rental_h * SECONDS_PER_H >= 1:
            raise UserError(f"machines must be rented for at least a second, got {self.rental_h:g} h")


def received_gb_per_h(*, bytes_per_publish: float, t_train_s: float, publish_period: int) -> float:
    """GB that reach a worker per hour: one snapshot or delta of ``bytes_per_publish`` every kappa·T_train seconds.

    What a worker's relay sends on to others is not in it, nor are trajectories, which are small beside snapshots.
    Raises UserError unless kappa·T_train is positive and the size at least 0 bytes.
    """
    period_s = publish_period * t_train_s
    if not (period_s > 0 and math.isfinite(period_s)):
        raise UserError(f"kappa * T_train must be more than 0 s, got {publish_period} * {t_train_s:g} s")
    if not (bytes_per_publish >= 0 and math.isfinite(bytes_per_publish)):
        raise UserError(f"a publish must have at least 0 bytes, got {bytes_per_publish:g}")
    return bytes_per_publish / BYTES_PER_GB * SECONDS_PER_H / period_s


def effective_usd_per_h(offer: Offer, terms: Terms) -> float:
    """c_i of equation (3), ours: price·max(1, minimum rental / rental) + traffic price · GB received per hour.

    The paper's c_i is the price alone. Traffic is billed per host on markets such as Vast and can exceed the price of
    a cheap GPU: 16.4 GB every 3,262 s at 0.02 USD/GB is 0.36 USD/h.
    """
    return float(effective_costs((offer,), terms)[0])


def effective_costs(offers: Sequence[Offer], terms: Terms) -> npt.NDArray[np.float64]:
    """[len(offers)] ``effective_usd_per_h`` of each."""
    longer = np.maximum(1.0, column(offers, "min_rental_h") / terms.rental_h)
    return column(offers, "usd_per_h") * longer + column(offers, "traffic_usd_per_gb") * terms.received_gb_per_h


def column(offers: Sequence[Offer], field: str) -> npt.NDArray[np.float64]:
    """[len(offers)] one numeric field of each."""
    return np.fromiter(map(attrgetter(field), offers), np.float64, len(offers))


def download_s(offer: Offer, bytes_per_publish: float) -> float | None:
    """Seconds that a publish takes to reach the machine at its full downlink; None where that is not known."""
    if offer.downlink_mbps is None:
        return None
    return bytes_per_publish * 8 / (offer.downlink_mbps * _BITS_PER_MBIT)


def read_offers(path: Path, *, estimate: Callable[[str], float] | None = None) -> tuple[Offer, ...]:
    """The offers of a CSV file, in its order; see ``parse_offers``."""
    return parse_offers(read_file(path, "a list of offers", MAX_FILE_BYTES), path.name, estimate=estimate)


def parse_offers(
    data: bytes, origin: str = "offers", *, estimate: Callable[[str], float] | None = None
) -> tuple[Offer, ...]:
    """The offers of a CSV text. ``estimate`` gives mu of a machine with the named GPU where the cell is empty.

    Raises ConfigError with one sentence per fault, each with its row and column; ``origin`` is what they call the text.
    """
    table = parse_table(data, origin, _COLUMNS)
    faults = list(table.faults)
    offers: list[Offer] = []
    rows_by_name: dict[str, int] = {}
    for row in table.rows:
        offer, wrong = _offer(row, estimate)
        if (name := row.cells["name"]) in rows_by_name:
            wrong.append(f"column name: must be there once, got {shorten(name)} in row {rows_by_name[name]} too")
        rows_by_name.setdefault(name, row.number)
        faults += [f"{origin}, row {row.number}, {fault}" for fault in wrong]
        if offer:
            offers.append(offer)
    if not table.rows and not faults:
        faults = [f"{origin} must hold at least one offer below its header, got none"]
    if faults:
        refuse(faults)
    return tuple(offers)


def _offer(row: Row, estimate: Callable[[str], float] | None) -> tuple[Offer | None, list[str]]:
    """The row's offer, or None and what is wrong with it."""
    faults = [f"column {column}: must not be empty" for column in ("name", "gpu") if not row.cells[column]]
    faults += [
        f"column {column}: must be printable text, got {shorten(row.cells[column])}"
        for column in ("name", "gpu")
        if not row.cells[column].isprintable()
    ]
    numbers: dict[str, float] = {}
    estimated = estimate is not None and not row.cells["rollouts_per_s"]
    for column, quantity in QUANTITIES.items():
        text = row.cells.get(column, "")
        if not text and column not in _REQUIRED:
            continue
        try:
            if column == "rollouts_per_s" and estimate and not text:
                numbers[column] = estimate(row.cells["gpu"])
            else:
                numbers[column] = quantity.read(text)
        except BadCell as error:
            faults.append(f"column {column}: {error}")
        except UserError as error:
            faults.append(f"column gpu: {error}")
    if faults:
        return None, faults
    count = int(numbers.pop("count"))
    offer = Offer(name=row.cells["name"], gpu=row.cells["gpu"], count=count, estimated=estimated, **numbers)
    return offer, []
