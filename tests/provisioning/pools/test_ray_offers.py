from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.errors import UserError
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.ray_offers import Needs, Node, Placed, RayOffer, most


def ray_offer(name: str, needs: Needs, count: int = 100, usd_per_h: float = 1.0) -> RayOffer:
    return RayOffer(Offer(name=name, gpu="A100", count=count, usd_per_h=usd_per_h, rollouts_per_s=1.0), needs)


def test_amounts_are_in_rays_names_and_leave_out_what_is_not_needed() -> None:
    needs = Needs(cpus=2.0, gpus=0.0, accelerator_type="A100", custom={"site": 1.0, "none": 0.0})
    assert needs.amounts() == {"CPU": 2.0, "site": 1.0, "accelerator_type:A100": 0.001}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cpus": -1.0}, "at least 0 of cpus, got -1"),
        ({"gpus": math.nan}, "at least 0 of gpus, got nan"),
        ({"custom": {"site": math.inf}}, "at least 0 of site, got inf"),
        ({"gpus": 1.5}, "at most 1 or a whole number, got 1.5"),
        ({"custom": {"GPU": 1.0}}, "must not be GPU, which are Ray's own"),
        ({"cpus": 0.0}, "must need some of a resource"),
    ],
)
def test_amounts_that_ray_would_not_give_are_the_users_mistake(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Needs(**wrong)


@pytest.mark.parametrize("name", ["two words", "a/b", ""])
def test_an_offers_name_must_fit_into_a_workers_name(name: str) -> None:
    with pytest.raises(UserError, match="letters, digits, dots, dashes and underscores"):
        ray_offer(name, Needs())


def test_room_is_counted_node_by_node() -> None:
    # Three GPUs are free, but no node has two.
    nodes = [Node(name, {"CPU": 8.0, "GPU": 1.0}) for name in ("one", "two", "three")]
    free = {"CPU": 24.0, "GPU": 3.0}
    assert most([ray_offer("pair", Needs(gpus=2.0))], nodes, free, []) == {"pair": 0}
    assert most([ray_offer("single", Needs(gpus=1.0))], nodes, free, []) == {"single": 3}
    assert most([ray_offer("half", Needs(gpus=0.5))], nodes, free, []) == {"half": 6}


def test_an_accelerator_is_only_where_its_node_says_so() -> None:
    nodes = [Node("one", {"CPU": 4.0, "GPU": 4.0, "accelerator_type:A100": 1.0}), Node("two", {"CPU": 4.0, "GPU": 4.0})]
    free = {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0}
    offers = [ray_offer("a100", Needs(gpus=1.0, accelerator_type="A100"))]
    assert most(offers, nodes, free, []) == {"a100": 4}


def test_what_others_use_is_no_room_and_what_is_ours_counts_as_ours() -> None:
    nodes = [Node("one", {"CPU": 4.0})]
    offers = [ray_offer("c", Needs(cpus=1.0))]
    assert most(offers, nodes, {"CPU": 1.0}, []) == {"c": 1}
    assert most(offers, nodes, {"CPU": 1.0}, [Placed("c", "one")] * 2) == {"c": 3}
    # One of ours waits to be placed: the room that is left is its.
    assert most(offers, nodes, {"CPU": 1.0}, [Placed("c", "one"), Placed("c")]) == {"c": 2}
    # What Ray does not report as used yet is used all the same.
    assert most(offers, nodes, {"CPU": 4.0}, [Placed("c", "one")] * 4) == {"c": 4}


def test_the_configured_count_is_the_limit_too() -> None:
    nodes = [Node("one", {"CPU": 64.0})]
    assert most([ray_offer("c", Needs(), count=3)], nodes, {"CPU": 64.0}, [Placed("c", "one")]) == {"c": 3}


def test_offers_that_compete_for_a_gpu_have_it_once_and_the_cheaper_first() -> None:
    nodes = [Node("one", {"CPU": 8.0, "GPU": 3.0})]
    offers = [ray_offer("dear", Needs(gpus=1.0), usd_per_h=2.0), ray_offer("cheap", Needs(gpus=2.0), usd_per_h=1.0)]
    assert most(offers, nodes, {"CPU": 8.0, "GPU": 3.0}, []) == {"cheap": 1, "dear": 1}


amounts = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0])
each_needs = st.builds(
    lambda cpus, whole, site: Needs(cpus=cpus, gpus=float(whole), custom={"site": site}),
    st.sampled_from([0.1, 0.5, 1.0, 2.0]), st.integers(0, 3), amounts,
)  # fmt: skip
each_node = st.builds(
    lambda cpus, gpus, site: {"CPU": float(cpus), "GPU": float(gpus), "site": site},
    st.integers(0, 16), st.integers(0, 8), amounts,
)  # fmt: skip


@given(
    st.lists(each_needs, min_size=1, max_size=4),
    st.lists(each_node, max_size=4),
    st.lists(st.floats(0.1, 9.0), min_size=4, max_size=4),
)
def test_all_that_is_offered_fits_the_cluster_at_once(
    needs: list[Needs], totals: list[dict[str, float]], prices: list[float]
) -> None:
    offers = [
        ray_offer(f"o{k}", each, usd_per_h=price) for k, (each, price) in enumerate(zip(needs, prices, strict=False))
    ]
    everything = {name: math.fsum(total[name] for total in totals) for name in ("CPU", "GPU", "site")}
    counts = most(offers, [Node(str(k), total) for k, total in enumerate(totals)], everything, [])
    for name, there in everything.items():
        asked = math.fsum(counts[each.offer.name] * each.needs.amounts().get(name, 0.0) for each in offers)
        assert asked <= there + 1e-2, "rounding by Ray's smallest unit for each machine at most"
    reordered = most(offers[::-1], [Node(str(k), total) for k, total in enumerate(totals)], everything, [])
    assert reordered == counts
