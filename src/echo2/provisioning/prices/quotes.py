"""What machines cost: the price list that comes with the package.

Invariant: every figure has a source, and one that nobody published for that very machine is marked as an assumption.
Nothing is fetched: prices change daily, so a plan that matters reads a fresh catalog (``prices.skypilot``).

The file's name is the day on which it was put together; ``collected`` is the day of a figure itself, empty where its
source has none. Where a source gives a range, the upper end is taken.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec

from echo2.errors import UserError
from echo2.provisioning.cells import BadCell, Quantity, shorten
from echo2.provisioning.table import Columns, Row, parse_table, refuse

PRICE_LIST = "2026-11-30.csv"

USD_PER_H = Quantity("USD per hour", over=0.0)
GPUS_PER_MACHINE = Quantity("GPUs", least=1, most=1024, whole=True)
_COLUMNS = Columns(("name", "provider", "gpu", "gpus", "usd_per_gpu_h", "collected", "assumption", "source"))


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one kind of machine.

    Raises UserError for a price that is none: 0 means unknown on markets, not free.
    """

    name: str
    """Unique in its list."""
    provider: str
    gpu: str
    """Our name for it (``provisioning.gpus``) where we have one."""
    gpus: int
    usd_per_h: float
    """Of the whole machine."""
    machine: str = ""
    """The provider's name for this type of machine; empty where its source has none."""
    accelerator: str = ""
    """The market's name for the GPU; empty where it is ours."""
    region: str = ""
    spot: bool = False
    """May be taken away at any time."""
    collected: str = ""
    """ISO date of the figure; empty where its source has none."""
    assumption: bool = False
    """Nobody published this figure for this machine; ``source`` says what it rests on."""
    source: str = ""

    def __post_init__(self) -> None:
        for field, quantity in (("usd_per_h", USD_PER_H), ("gpus", GPUS_PER_MACHINE)):
            if fault := quantity.fault(getattr(self, field)):
                raise UserError(f"quote {shorten(self.name)}: {field} {fault}")


def price_list() -> tuple[Quote, ...]:
    """The committed prices, assumptions included."""
    data = files("echo2.provisioning.prices").joinpath(PRICE_LIST).read_bytes()
    return parse_quotes(data, PRICE_LIST)


def parse_quotes(data: bytes, origin: str = "prices") -> tuple[Quote, ...]:
    """The quotes of a CSV text in the format of the committed list. Raises ConfigError with a sentence per fault."""
    table = parse_table(data, origin, _COLUMNS)
    faults, quotes, names = list(table.faults), list[Quote](), set[str]()
    for row in table.rows:
        try:
            quotes.append(_quote(row))
        except BadCell as error:
            faults.append(f"{origin}, row {row.number}, {error}")
        if row.cells["name"] in names:
            doubled = shorten(row.cells["name"])
            faults.append(f"{origin}, row {row.number}, column name: must be new, got {doubled} again")
        names.add(row.cells["name"])
    if faults:
        refuse(faults)
    return tuple(quotes)


def _quote(row: Row) -> Quote:
    cells = row.cells
    for column in ("name", "provider", "gpu", "source"):
        if not cells[column]:
            raise BadCell(f"column {column}: must not be empty")
    if cells["assumption"] not in ("yes", "no"):
        raise BadCell(f"column assumption: must be yes or no, got {shorten(cells['assumption'])}")
    numbers: dict[str, float] = {}
    for column, quantity in (("gpus", GPUS_PER_MACHINE), ("usd_per_gpu_h", USD_PER_H)):
        try:
            numbers[column] = quantity.read(cells[column])
        except BadCell as error:
            raise BadCell(f"column {column}: {error}") from None
    return Quote(
        name=cells["name"],
        provider=cells["provider"],
        gpu=cells["gpu"],
        gpus=int(numbers["gpus"]),
        usd_per_h=numbers["gpus"] * numbers["usd_per_gpu_h"],
        collected=cells["collected"],
        assumption=cells["assumption"] == "yes",
        source=cells["source"],
    )
