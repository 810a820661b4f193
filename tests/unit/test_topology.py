from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlaunch.errors import PlanError
from kvlaunch.plan.topology import Topology, even_layers, layers_from_counts

SIZES = st.integers(1, 24)


def place(tp: int, pp: int, nnodes: int) -> Topology | PlanError:
    try:
        return Topology(tp, pp, nnodes)
    except PlanError as error:
        return error


@given(tp=SIZES, pp=SIZES, nnodes=st.integers(1, 12))
def test_every_placement_is_exact_or_refused(tp: int, pp: int, nnodes: int) -> None:
    topology = place(tp, pp, nnodes)
    if isinstance(topology, PlanError):
        assert all(f"{name}={value}" in topology.message for name, value in (("tp", tp), ("pp", pp)))
        return
    world = list(range(tp * pp))
    assert [rank for pp_rank in range(pp) for rank in topology.stage(pp_rank)] == world
    assert [rank for node in range(nnodes) for rank in topology.node_ranks(node)] == world
    assert len({len(topology.node_ranks(node)) for node in range(nnodes)}) == 1
    for rank in world:
        assert topology.global_rank(*topology.coordinates(rank)) == rank
        assert topology.node_ranks(topology.node(rank))[topology.local_rank(rank)] == rank


@given(tp=SIZES, pp=SIZES, nnodes=st.integers(1, 12))
def test_a_stage_stays_on_one_node_where_it_fits(tp: int, pp: int, nnodes: int) -> None:
    topology = place(tp, pp, nnodes)
    if isinstance(topology, PlanError):
        return
    for pp_rank in range(pp):
        nodes = {topology.node(rank) for rank in topology.stage(pp_rank)}
        assert len(nodes) == max(1, tp // topology.ranks_per_node)


@given(tp=SIZES, pp=SIZES, nnodes=st.integers(1, 12))
def test_a_refusal_proposes_what_works(tp: int, pp: int, nnodes: int) -> None:
    refused = place(tp, pp, nnodes)
    if not isinstance(refused, PlanError):
        return
    assert refused.hint is not None
    proposals = refused.hint.removeprefix("Use ").removesuffix(".").split(" or ")
    assert len(proposals) == 2
    for proposal in proposals:
        sizes = dict(part.split("=") for part in proposal.split(" (")[0].split())
        Topology(int(sizes["tp"]), int(sizes["pp"]), int(sizes["nnodes"]))


def test_two_by_two_over_two_nodes() -> None:
    topology = Topology(2, 2, nnodes=2)
    assert [topology.coordinates(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [topology.node(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.local_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert (topology.leader(1), topology.stage(1), topology.world_size) == (2, (2, 3), 4)


def test_a_stage_may_cover_whole_nodes() -> None:
    topology = Topology(8, 1, nnodes=4)
    assert [topology.node(rank) for rank in topology.stage(0)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("tp", "pp", "nnodes", "rule"),
    [
        (3, 1, 2, "world_size 3 (tp x pp) cannot be split over 2 nodes"),
        (2, 3, 2, "a stage of 2 ranks would be cut"),
        (4, 3, 4, "a stage of 4 ranks does not cover whole nodes"),
        (1, 1, 2, "cannot be split over 2 nodes"),
        (0, 1, 1, "tp=0"),
        (1, -1, 1, "pp=-1"),
    ],
)
def test_refusals_name_the_rule(tp: int, pp: int, nnodes: int, rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        Topology(tp, pp, nnodes)
    assert rule in caught.value.message


@pytest.mark.parametrize("call", ["coordinates", "node", "local_rank", "stage", "node_ranks"])
@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_outside_is_an_error(call: str, index: int) -> None:
    with pytest.raises(IndexError):
        getattr(Topology(4, 2, 2), call)(index)


def test_kv_heads_are_split_then_replicated() -> None:
    assert [Topology(tp, 1).kv_heads_per_rank(4) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_layers", "pp", "counts"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (36, 5, [7, 7, 7, 8, 7]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (126, 64, [1] + [2] * 62 + [1]),
    ],
)
def test_layers_left_over_go_where_vllm_puts_them(num_layers: int, pp: int, counts: list[int]) -> None:
    assert even_layers(num_layers, pp) == layers_from_counts(counts)


@given(num_layers=st.integers(1, 200), pp=st.integers(1, 70))
def test_each_layer_is_held_by_exactly_one_stage(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        with pytest.raises(ValueError, match="cannot be split"):
            even_layers(num_layers, pp)
        return
    split = even_layers(num_layers, pp)
    assert [layer for first, last in split for layer in range(first, last + 1)] == list(range(num_layers))
    assert max(last - first for first, last in split) - min(last - first for first, last in split) <= 1
