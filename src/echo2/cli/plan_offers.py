"""The offers that ``echo2 plan`` chooses from.

Invariant: what is used can be told: throughputs that nobody measured are marked, what was left out is counted, and
prices come with their age.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.errors import UserError
from echo2.provisioning.estimate import ASSUMED_MACHINES, DEFAULT_EFFICIENCY, Workload, estimated_offers, rollouts_per_s
from echo2.provisioning.gpus import market_name
from echo2.provisioning.offers import Offer, read_offers
from echo2.provisioning.prices.quotes import PRICE_LIST, Quote, price_list
from echo2.provisioning.prices.skypilot import MAX_FILE_BYTES, Catalog, parse_catalog, read_catalog
from echo2.provisioning.table import read_file

if TYPE_CHECKING:
    from echo2.cli.plan_inputs import Flags, Source

COMMITTED = "prices"
"""What ``--offers`` calls the list that comes with the package."""
MARK_OF_A_CATALOG = b"AcceleratorName"
DEFAULT_PROMPT_TOKENS = 200.0
SHOWN_GPUS = 8
SECONDS_PER_DAY = 86400.0
WORKERS_LIKE_THE_RUNS = 10_000


def read_market(flags: Flags, source: Source) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """Offers and what people should know about them. Raises UserError."""
    rates = _measured_rates(flags, source)
    workload = _workload(flags, source)
    if flags.spot and (flags.offers is None or flags.offers == COMMITTED):
        raise UserError("--spot must come with a SkyPilot catalog in --offers: only that has spot prices")
    if flags.offers is None:
        return _of_pools(source, workload, rates) or _like_the_runs(source)
    if flags.offers == COMMITTED:
        notes = [f"prices: the list that comes with this package, {PRICE_LIST.removesuffix('.csv')}"]
        quotes = price_list()
        if assumed := [quote.name for quote in quotes if quote.assumption]:
            notes.append(f"assumed prices: {', '.join(assumed)}")
        return _of_quotes(flags, quotes, workload, rates, notes)
    path = Path(flags.offers)
    if (catalog := _catalog(path, spot=flags.spot)) is not None:
        return _of_quotes(flags, catalog.quotes, workload, rates, [_age(path), *catalog.left_out])
    if flags.spot:
        raise UserError(f"--spot must come with a SkyPilot catalog in --offers, and {path} is a list of offers")
    return _of_list(path, workload, rates)


def _of_list(
    path: Path, workload: Workload | None, rates: dict[str, float]
) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """A list of offers; an empty throughput is measured or estimated where that was asked for."""

    def rate(gpu: str) -> float:
        if (known := rates.get(market_name(gpu))) is not None:
            return known
        if workload is None:
            raise UserError(f"{gpu!r} has no throughput: fill in rollouts_per_s, or give --measured {gpu}=PER_S")
        return rollouts_per_s(workload, gpu)

    offers = read_offers(path, estimate=rate if workload or rates else None)
    return tuple(_as_measured(offer) if market_name(offer.gpu) in rates else offer for offer in offers), ()


def _of_pools(
    source: Source, workload: Workload | None, rates: dict[str, float]
) -> tuple[tuple[Offer, ...], tuple[str, ...]] | None:
    """What the configuration's own pools have; None where no pool has a list."""
    paths = [Path(pool.offers) for pool in source.config.pools if pool.offers] if source.config else []
    offers = tuple(offer for path in paths for offer in _of_list(path, workload, rates)[0])
    names = ", ".join(path.name for path in paths)
    return (offers, (f"no --offers: those of the configuration's pools, {names}",)) if offers else None


def _as_measured(offer: Offer) -> Offer:
    import msgspec

    return msgspec.structs.replace(offer, estimated=False)


def _of_quotes(
    flags: Flags, quotes: Sequence[Quote], workload: Workload | None, rates: dict[str, float], notes: list[str]
) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    if workload is None and not rates:
        raise UserError(
            f"--offers {flags.offers} has prices without throughput: give --parameters, --kv-bytes-per-token and "
            "--reply-tokens for an estimate, or --measured GPU=PER_S"
        )
    count = flags.machines or ASSUMED_MACHINES
    offers, left_out = estimated_offers(quotes, workload, count=count, measured=rates)
    if left_out:
        used = {offer.name for offer in offers}
        unknown = Counter(quote.gpu for quote in quotes if quote.name not in used)
        names = [gpu for gpu, _ in unknown.most_common(SHOWN_GPUS)]
        more = f" and {len(unknown) - len(names)} more" if len(unknown) > len(names) else ""
        notes.append(f"left out, without a throughput: {len(left_out)} machines with {', '.join(names)}{more}")
    if not offers:
        raise UserError(f"--offers {flags.offers} must have a machine of known throughput, but {left_out[0]}")
    notes.append(f"{count} machines of each kind are assumed to be there (--machines)")
    return offers, tuple(notes)


def _like_the_runs(source: Source) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """As many workers like the run's own as are wanted, at the price in its configuration."""
    rate, config = source.measured.rollouts_per_worker_per_s, source.config
    if rate is None or config is None:
        raise UserError(
            "a plan must know what can be rented: give --offers with a CSV file, a SkyPilot catalog or the word prices"
        )
    if not config.workers.usd_per_h:
        raise UserError(f"workers of {source.folder} must have a price, and its workers.usd_per_h is 0: give --offers")
    worker = Offer(
        name=f"worker of {source.folder}",
        gpu="as in the run",
        count=WORKERS_LIKE_THE_RUNS,
        usd_per_h=config.workers.usd_per_h,
        rollouts_per_s=rate,
    )
    return (worker,), ("no --offers: workers like the run's own, at its workers.usd_per_h and measured throughput",)


def _catalog(path: Path, *, spot: bool) -> Catalog | None:
    """None when ``path`` is no catalog."""
    try:
        if path.is_dir():
            return read_catalog(path, spot=spot)
        if not path.is_file():
            return None  # a pipe can be read once only, or it is not there, which is told when it is read as a list
        with path.open("rb") as file:
            marked = MARK_OF_A_CATALOG in file.readline(4096)
    except OSError:
        return None  # the same
    if not marked:
        return None
    return parse_catalog(read_file(path, "a SkyPilot catalog", MAX_FILE_BYTES), path.resolve().parent.name, spot=spot)


def _age(path: Path) -> str:
    """When the catalog's newest file was written: prices change daily, and an old one is no price."""
    files = [*path.glob("vms.csv"), *path.glob("*/vms.csv")] if path.is_dir() else [path]
    written = max(file.stat().st_mtime for file in files)
    day = time.strftime("%Y-%m-%d", time.gmtime(written))
    return f"prices: SkyPilot catalog, files of {day}, {max(0.0, time.time() - written) / SECONDS_PER_DAY:.1f} days old"


def _measured_rates(flags: Flags, source: Source) -> dict[str, float]:
    """Trajectories per second of one GPU, by our name for it."""
    rates: dict[str, float] = {}
    for gpu, rate in flags.measured:
        known = rate if rate is not None else source.measured.rollouts_per_worker_per_s
        if known is None:
            raise UserError(f"--measured {gpu} must have a number, or a run folder that measured one")
        rates[market_name(gpu)] = known
    return rates


def _workload(flags: Flags, source: Source) -> Workload | None:
    """What is to be estimated; None when no estimate was asked for."""
    asked = {"--parameters": flags.parameters, "--kv-bytes-per-token": flags.kv_bytes_per_token}
    reply_tokens = flags.reply_tokens or source.measured.reply_tokens
    if flags.parameters is None or flags.kv_bytes_per_token is None or reply_tokens is None:
        given = [flag for flag, value in asked.items() if value is not None]
        if given:
            needed = asked | {"--reply-tokens": reply_tokens}
            missing = [flag for flag, value in needed.items() if value is None]
            raise UserError(f"an estimate must have {', '.join(needed)}, got none for {', '.join(missing)}: give them")
        return None
    config = source.config
    return Workload(
        parameters=flags.parameters,
        kv_bytes_per_token=flags.kv_bytes_per_token,
        prompt_tokens=flags.prompt_tokens or DEFAULT_PROMPT_TOKENS,
        reply_tokens=reply_tokens,
        group_size=flags.group_size or (config.rollout.group_size if config else 1),
        efficiency=flags.efficiency or DEFAULT_EFFICIENCY,
    )
