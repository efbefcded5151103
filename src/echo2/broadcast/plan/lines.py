"""Who stands behind whom: workers in N lines, the best in front.

Invariant: within a line rates fall, so nobody waits for a slower one in front of it; a node that cannot be dialled
stands last in its line, because it feeds nobody. A line that stood before is kept where that costs nothing: its links
are open and know their speed.
"""

from __future__ import annotations

import math

from echo2.broadcast.plan.draft import MEASURING_SLACK, Problem, relay_rate
from echo2.broadcast.plan.model import Node

SAME_RATE = 1.25
"""Rates within this factor are one class; a node keeps its place among its class."""
UNEVEN = 2
"""Lines that stood before may differ by so many nodes: one hop more costs less than a cold link."""


def line_count(problem: Problem) -> int:
    """N = ⌊B_0/r⌋ of the paper, for unlike nodes: as many heads as the uplink feeds, each at its own rate up to r.

    No more of them than make the lines shorter: nine lines of 32 nodes are as long as eight, cost the seed a copy more,
    and ask more of an uplink that may not have it.

    Each line's tail may feed one node that cannot be dialled; those beyond that hang on the seed in any case, so
    there are at least as many lines as such nodes, if there are heads for them.
    """
    heads, typical = problem.reachable, problem.rate
    fed, count = 0.0, 0
    for node in heads:
        fed += min(node.down_bytes_per_s, typical)  # what it takes, whatever it passes on
        if count and fed > problem.uplink_bytes_per_s * (1 + MEASURING_SLACK):
            break
        count += 1
    if count:
        longest = math.ceil(len(heads) / count)
        count = math.ceil(len(heads) / longest)
    return max(count, min(len(heads), len(problem.unreachable)))


def stand(problem: Problem, count: int) -> tuple[list[list[Node]], list[Node]]:
    """The lines, and the nodes that no line has room for: each is fed by the seed alone.  count: at most as many as
    nodes that can be dialled."""
    before = {
        name: (line, place) for line, names in enumerate(problem.previous[:count]) for place, name in enumerate(names)
    }
    lines: list[list[Node]] = [[] for _ in range(count)]
    heads, typical = problem.reachable, problem.rate
    for node in heads:
        if node.node_id in before:
            lines[before[node.node_id][0]].append(node)
    uneven = UNEVEN if all(lines) else 1
    for node in heads:
        if node.node_id not in before:
            min(lines, key=len).append(node)
    _even_out(lines, uneven)
    for line in lines:
        line.sort(key=lambda node: _rank(node, typical, before.get(node.node_id, (0, len(heads)))[1]))
    return lines, _add_leaves(problem, lines, before)


def _even_out(lines: list[list[Node]], uneven: int) -> None:
    """Move tails of long lines to short ones."""
    while lines and len(longest := max(lines, key=len)) - len(shortest := min(lines, key=len)) > uneven:
        shortest.append(longest.pop())


def _rank(node: Node, typical: float, before: int) -> tuple[int, int, float, str]:
    """Classes are counted from the typical rate, so that a fleet of like nodes is one class."""
    rate = relay_rate(node)
    return -round(math.log(rate / typical, SAME_RATE)), before, -rate, node.node_id


def _add_leaves(problem: Problem, lines: list[list[Node]], before: dict[str, tuple[int, int]]) -> list[Node]:
    """One node that cannot be dialled to each line, the quickest behind the quickest tails; return those left over."""
    free = dict(enumerate(lines))
    left = []
    for node in problem.unreachable:
        if not free:
            left.append(node)
            continue
        kept = before.get(node.node_id, (-1, 0))[0]
        chosen = kept if kept in free else max(free, key=lambda line: (relay_rate(free[line][-1]), -len(free[line])))
        free.pop(chosen).append(node)
    return left
