"""Ranks: the only place where a rank, a stage or a node is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlaunch.errors import PlanError

LayerRange = tuple[int, int]
"""First and last layer, both included."""


@dataclass(frozen=True, slots=True)
class Topology:
    """tp_size x pp_size ranks in nnodes equal, contiguous blocks.

    `global_rank = pp_rank * tp_size + tp_rank`, as in vLLM, SGLang and Megatron. Node n holds the global ranks
    [n * ranks_per_node, (n + 1) * ranks_per_node). A stage stays inside one node wherever tp_size fits into one; a
    larger stage covers whole nodes.

    Raises:
        PlanError: a size is below 1, or the ranks cannot be placed so.
    """

    tp_size: int
    pp_size: int
    nnodes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp_size), ("pp", self.pp_size), ("nnodes", self.nnodes)):
            if value < 1:
                raise PlanError(f"{name}={value} is not possible: it must be at least 1.")
        problem = _placement_problem(self.tp_size, self.pp_size, self.nnodes)
        if problem is not None:
            asked = f"nnodes={self.nnodes} tp={self.tp_size} pp={self.pp_size}"
            raise PlanError(f"{asked}: {problem}", hint=f"Use {_working(self.tp_size, self.pp_size, self.nnodes)}.")

    @property
    def world_size(self) -> int:
        """tp_size * pp_size."""
        return self.tp_size * self.pp_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    def global_rank(self, pp_rank: int, tp_rank: int) -> int:
        """Raises IndexError outside the topology."""
        _check_index("pp_rank", pp_rank, self.pp_size)
        _check_index("tp_rank", tp_rank, self.tp_size)
        return pp_rank * self.tp_size + tp_rank

    def coordinates(self, global_rank: int) -> tuple[int, int]:
        """(pp_rank, tp_rank). Raises IndexError outside the topology."""
        _check_index("global_rank", global_rank, self.world_size)
        return divmod(global_rank, self.tp_size)

    def stage(self, pp_rank: int) -> tuple[int, ...]:
        """Global ranks of one pipeline stage, its leader first."""
        first = self.leader(pp_rank)
        return tuple(range(first, first + self.tp_size))

    def leader(self, pp_rank: int) -> int:
        """Global rank of the stage's tp_rank 0."""
        return self.global_rank(pp_rank, 0)

    def node(self, global_rank: int) -> int:
        """Node that holds the rank."""
        _check_index("global_rank", global_rank, self.world_size)
        return global_rank // self.ranks_per_node

    def local_rank(self, global_rank: int) -> int:
        """Place of the rank on its node."""
        _check_index("global_rank", global_rank, self.world_size)
        return global_rank % self.ranks_per_node

    def node_ranks(self, node_rank: int) -> tuple[int, ...]:
        """Global ranks of one node."""
        _check_index("node_rank", node_rank, self.nnodes)
        first = node_rank * self.ranks_per_node
        return tuple(range(first, first + self.ranks_per_node))

    def kv_heads_per_rank(self, num_kv_heads: int) -> int:
        """KV heads that each rank holds; with more ranks than heads every rank holds one, replicated."""
        return max(1, num_kv_heads // self.tp_size)


def even_layers(num_layers: int, pp_size: int) -> tuple[LayerRange, ...]:
    """Layers of each stage by vLLM's rule (get_pp_indices in vllm/distributed/utils.py).

    Every stage gets num_layers // pp_size layers. The layers left over go one each to the stages before the last,
    from the second-last backwards: the last stage has the output head besides, and the first the embeddings.

    Raises:
        ValueError: fewer layers than stages (`fit.check_pp` tells the user).
    """
    if pp_size > num_layers:
        raise ValueError(f"{num_layers} layers cannot be split over {pp_size} stages")
    base, extra = divmod(num_layers, pp_size)
    counts = [base] * pp_size
    for i in range(2, extra + 2):
        counts[-i] += 1
    return layers_from_counts(counts)


def layers_from_counts(counts: Sequence[int]) -> tuple[LayerRange, ...]:
    """Consecutive ranges of these many layers each; every count is at least 1."""
    ranges = []
    first = 0
    for count in counts:
        ranges.append((first, first + count - 1))
        first += count
    return tuple(ranges)


def _check_index(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise IndexError(f"{name}={value} is outside 0..{size - 1}")


def _placement_problem(tp_size: int, pp_size: int, nnodes: int) -> str | None:
    """Why the ranks cannot be placed, or None where they can."""
    world_size = tp_size * pp_size
    if world_size % nnodes:
        return f"world_size {world_size} (tp x pp) cannot be split over {nnodes} nodes evenly."
    per_node = world_size // nnodes
    if per_node % tp_size == 0 or tp_size % per_node == 0:
        return None
    if tp_size < per_node:
        return f"with {per_node} ranks a node, a stage of {tp_size} ranks would be cut by the border of a node."
    return f"with {per_node} ranks a node, a stage of {tp_size} ranks does not cover whole nodes."


def _working(tp_size: int, pp_size: int, nnodes: int) -> str:
    """Combinations near what was asked that can be placed."""

    def fits(tp: int, pp: int, nodes: int) -> bool:
        return _placement_problem(tp, pp, nodes) is None

    # pp = nnodes always fits (a stage a node), so both searches end.
    pps = (pp for distance in range(1, pp_size + nnodes + 1) for pp in (pp_size + distance, pp_size - distance))
    near_pp = next(pp for pp in pps if pp >= 1 and fits(tp_size, pp, nnodes))
    near_nodes = next(n for n in range(nnodes - 1, 0, -1) if fits(tp_size, pp_size, n))
    return (
        f"nnodes={nnodes} tp={tp_size} pp={near_pp} (world_size {tp_size * near_pp}) "
        f"or nnodes={near_nodes} tp={tp_size} pp={pp_size}"
    )
