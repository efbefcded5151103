"""What a run may rent through SkyPilot: rows of its catalog that somebody asked for, as offers.

Invariant: every offer has one row behind it, so that what is ordered is the machine whose price was compared: the same
cloud, region, machine type and kind of price. Its name depends on nothing but that row, so that it is the same after a
restart, and it is fit to name a machine and its worker after.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from echo2.errors import UserError
from echo2.provisioning.estimate import Workload, rollouts_per_s
from echo2.provisioning.gpus import market_name
from echo2.provisioning.offers import Offer
from echo2.provisioning.prices.quotes import Quote

MOST_CHARACTERS = 48
"""Of an offer's name. A machine's id is this name and a number; labels of clouds hold 63 characters."""
_TAIL = 8
_CLOUD = re.compile(r"[a-z0-9_-]+")


class Rentable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines that the run may rent.

    Example: ``Rentable(cloud="gcp", gpu="A100-80GB", region="us-central1", spot=True, count=8)``.

    Raises UserError for values that name no machine.
    """

    cloud: str
    """As SkyPilot's catalog calls its folder: aws, azure, gcp, lambda, runpod, vast, …"""
    gpu: str
    """Our name for it, or the market's."""
    gpus: int = 1
    """In each machine."""
    region: str = ""
    """Empty: every region is an offer of its own."""
    spot: bool = False
    """Cheaper, and may be taken away."""
    count: int = 1
    """Machines of each offer that the run may have at one time."""
    rollouts_per_s: float | None = None
    """Of one machine, measured; None: estimated from the workload."""
    traffic_usd_per_gb: float = 0.0
    """Received; SkyPilot's catalog has no price of it."""
    reliability: float = 1.0

    def __post_init__(self) -> None:
        if not _CLOUD.fullmatch(self.cloud):
            raise UserError(f'a cloud must be named as in SkyPilot\'s catalog, such as "gcp", got {self.cloud!r}')
        if not self.gpu:
            raise UserError(f"machines of {self.cloud} must have a GPU: name it")
        for field in ("gpus", "count"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} of {self.cloud} {self.gpu} must be at least 1, got {getattr(self, field)}")

    def admits(self, quote: Quote) -> bool:
        named = self.gpu.casefold() in (quote.gpu.casefold(), quote.accelerator.casefold())
        return (
            self.cloud == quote.provider
            and (named or market_name(self.gpu) == quote.gpu)
            and self.gpus == quote.gpus
            and self.region in ("", quote.region)
            and self.spot == quote.spot
        )


class Rental(msgspec.Struct, frozen=True):
    """One offer, and what SkyPilot must be asked for to get it."""

    offer: Offer
    quote: Quote

    @property
    def infra(self) -> str:
        """Cloud and region as SkyPilot writes them: ``gcp/us-central1``."""
        return f"{self.quote.provider}/{self.quote.region}"


def rentals(quotes: Iterable[Quote], wanted: Sequence[Rentable], workload: Workload | None = None) -> dict[str, Rental]:
    """By name of the offer; where several entries of ``wanted`` admit a quote, the first counts.

    Raises UserError for a machine whose throughput is neither given nor can be estimated.
    """
    found: dict[str, Rental] = {}
    for quote in sorted(quotes, key=lambda quote: quote.name):
        entry = next((entry for entry in wanted if entry.admits(quote)), None)
        if entry is None:
            continue
        offer = _offer(quote, entry, workload)
        before = found.get(offer.name)
        # Two spellings of one machine type share a name: the dearer price stands, so no bill is higher than planned.
        if before is None or before.quote.usd_per_h < quote.usd_per_h:
            found[offer.name] = Rental(offer, quote)
    return found


def _offer(quote: Quote, entry: Rentable, workload: Workload | None) -> Offer:
    rate = entry.rollouts_per_s
    if rate is None:
        if workload is None:
            raise UserError(
                f"machines with {quote.gpu} of {quote.provider} must have a throughput: give rollouts_per_s, or the "
                "workload that it is to be estimated from"
            )
        rate = rollouts_per_s(workload, quote.gpu, quote.gpus)
    return Offer(
        name=offer_name(quote),
        gpu=quote.gpu,
        count=entry.count,
        usd_per_h=quote.usd_per_h,
        rollouts_per_s=rate,
        traffic_usd_per_gb=entry.traffic_usd_per_gb,
        reliability=entry.reliability,
        estimated=entry.rollouts_per_s is None,
    )


def offer_name(quote: Quote) -> str:
    """Cloud, machine, region and ``spot`` in lower-case letters, digits and dashes. ``gcp-a2-highgpu-1g-us-central1``.

    The machine type implies its GPUs. One that is too long keeps its beginning and ends in a digest of the rest.
    """
    words = (quote.provider, quote.machine, quote.region, "spot" if quote.spot else "")
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
    if len(name) <= MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(quote.name.encode()).hexdigest()[:_TAIL]
    return f"{name[: MOST_CHARACTERS - _TAIL - 1].rstrip('-')}-{digest}"
