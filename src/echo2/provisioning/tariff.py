"""The last good price of every offer, and how old it is.

Invariant (field report I01): only what an offer can cost is a price. Zero, nothing and nonsense mean unknown, never
free and never gone; a price that is too old is unknown too. Immutable; time enters as a number.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from echo2.provisioning.observation import Listing, Price
from echo2.provisioning.offers import QUANTITIES

LEAST_USD_PER_H = 1e-6
"""Less than this nobody asks for; a feed that says it means nothing (I01)."""
_CLOCK_SLACK_S = 60.0
"""A feed's clock may be so much ahead of ours; what it dates later than that it cannot know."""


class Known(msgspec.Struct, frozen=True):
    usd_per_h: float
    at_s: float


class Tariff(msgspec.Struct, frozen=True):
    known: dict[str, Known] = {}
    """By name of the offer."""

    def learn(self, listings: Iterable[Listing], now_s: float) -> Tariff:
        """Take the newest good price of each offer; of several sellers of one moment the dearest, so that the bill is
        never higher than planned."""
        known = dict(self.known)
        for listing in listings:
            good = [(price.at_s, usd) for price in listing.prices if (usd := _good(price, now_s)) is not None]
            if not good:
                continue
            newest, before = max(good), known.get(listing.offer.name)
            if before is None or newest > (before.at_s, before.usd_per_h):
                known[listing.offer.name] = Known(usd_per_h=newest[1], at_s=newest[0])
        return Tariff(known)

    def moved(self, shift_s: float) -> Tariff:
        """The same on a clock that shows ``shift_s`` more."""
        return Tariff({name: Known(known.usd_per_h, known.at_s + shift_s) for name, known in self.known.items()})

    def price(self, name: str, now_s: float, max_age_s: float) -> Known | None:
        """The price of an offer, or None where nobody knows it now."""
        found = self.known.get(name)
        return found if found is not None and now_s - found.at_s <= max_age_s else None


def _good(price: Price, now_s: float) -> float | None:
    usd_per_h = price.usd_per_h
    if usd_per_h is None or usd_per_h < LEAST_USD_PER_H or QUANTITIES["usd_per_h"].fault(usd_per_h):
        return None
    return usd_per_h if price.at_s <= now_s + _CLOCK_SLACK_S else None
