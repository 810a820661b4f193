"""SGLang's allocators over elastic blocks, beside the stock ones: same counts at every step, fewer pages."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # what SGLang imports on the way says what it lacks
    from sglang.srt.mem_cache.allocator import swa
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from kvlaunch.engines.sglang import attention
from kvlaunch.engines.sglang.allocators import Blocks, ElasticPagedAllocator, ElasticTokenAllocator, parts_of
from kvlaunch.errors import CompatibilityError, KVCommitError
from kvlaunch.kv.geometry import BlockGeometry
from kvlaunch.kv.ipc.local import LocalChannel
from kvlaunch.kv.manager import KVCacheManager
from kvlaunch.kv.memory.noop import NoopBackend
from kvlaunch.kv.rank import RankMemory
from kvlaunch.kv.settings import KVSettings

pytestmark = pytest.mark.sglang

BLOCKS_PER_PAGE = 16
Maker = Any


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    made = make_manager(4096)
    yield made
    made.close()


def make_manager(num_blocks: int, fault: Any = None) -> KVCacheManager:
    geometry = BlockGeometry.from_strips(
        [(0, 256), (num_blocks * 256, 256)],
        num_blocks=num_blocks,
        blocks_per_page=BLOCKS_PER_PAGE,
        granularity=4096,
    )
    memory = RankMemory(
        NoopBackend().reserve(geometry.region_bytes),
        geometry,
        global_rank=3,
        pp_rank=0,
        tp_rank=0,
        run="r",
        epoch=0,
        fault=fault,
    )
    made = KVCacheManager(
        world_size=1,
        settings=KVSettings(
            num_blocks=num_blocks,
            blocks_per_page=BLOCKS_PER_PAGE,
            ahead_low=0,
            ahead_high=0,
            limit_binds=False,
            idle_s=0.0,
        ),
        channel=LocalChannel(memory),
        wake=lambda: None,
    )
    made.start()
    return made


def elastic(manager: KVCacheManager, page_size: int) -> Any:
    size = (manager.settings.num_blocks - 1) * page_size
    pool = SimpleNamespace(kvlaunch_blocks=Blocks(manager, 3))
    if page_size == 1:
        return ElasticTokenAllocator(size, torch.bfloat16, "cpu", kvcache=pool, need_sort=False)
    return ElasticPagedAllocator(size, page_size, torch.bfloat16, "cpu", kvcache=pool, need_sort=False)


def manager_blocks(allocator: Any) -> Blocks:
    found = allocator._blocks
    assert isinstance(found, Blocks)
    return found


def stock(manager: KVCacheManager, page_size: int) -> Any:
    size = (manager.settings.num_blocks - 1) * page_size
    if page_size == 1:
        return TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", kvcache=None, need_sort=False)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", kvcache=None, need_sort=False)


class Requests:
    """Requests with slots of one allocator: extended, decoded and freed as SGLang does it."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.slots: dict[int, torch.Tensor] = {}

    def extend(self, request: int, tokens: int) -> bool:
        allocator, before = self.allocator, self.slots.get(request, torch.empty(0, dtype=torch.int64))
        if allocator.page_size == 1:
            got = allocator.alloc(tokens)
        else:
            old, new = torch.tensor([len(before)]), torch.tensor([len(before) + tokens])
            last = before[-1:] if len(before) else torch.tensor([-1])
            got = allocator.alloc_extend(old, old, new, new, last, tokens)
        if got is None:
            return False
        self.slots[request] = torch.cat((before, got))
        return True

    def decode(self) -> bool:
        allocator, order = self.allocator, list(self.slots)
        if allocator.page_size == 1:
            got = allocator.alloc(len(order))
        else:
            lens = torch.tensor([len(self.slots[r]) + 1 for r in order])
            last = torch.tensor([int(self.slots[r][-1]) for r in order])
            got = allocator.alloc_decode(lens, lens, last)
        if got is None:
            return False
        for request, slot in zip(order, got, strict=True):
            self.slots[request] = torch.cat((self.slots[request], slot.reshape(1)))
        return True

    def free(self, requests: list[int]) -> None:
        self.allocator.free_group_begin()
        for request in requests:
            self.allocator.free(self.slots.pop(request))
        self.allocator.free_group_end()

    def check(self) -> None:
        """No slot belongs to two requests, none is one of the padded tokens', and pages are whole."""
        page_size = self.allocator.page_size
        taken = [int(slot) for slots in self.slots.values() for slot in slots]
        assert len(set(taken)) == len(taken)
        assert not taken or min(taken) >= page_size
        owners = [{int(slot) // page_size for slot in slots} for slots in self.slots.values()]
        assert sum(map(len, owners)) == len(set().union(*owners))
        for slots in self.slots.values():
            for i in range(1, len(slots)):
                if i % page_size:
                    assert slots[i] == slots[i - 1] + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_stock_sglang(manager: KVCacheManager, page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    pair = [Requests(elastic(manager, page_size)), Requests(stock(manager, page_size))]
    for step in range(300):
        manager.step_scheduled()
        action, tokens = rng.random(), rng.randrange(1, 40 * page_size)
        dead = [r for r in pair[0].slots if rng.random() < 0.3]
        for requests in pair:
            if action < 0.35:
                done = requests.extend(step, tokens)
                assert done == (step in pair[0].slots)
            elif action < 0.85 and requests.slots:
                requests.decode()
            else:
                requests.free(dead)
        assert pair[0].allocator.available_size() == pair[1].allocator.available_size()
        assert {r: len(s) for r, s in pair[0].slots.items()} == {r: len(s) for r, s in pair[1].slots.items()}
        manager.step_finished()
    pair[0].check()
    pair[1].check()


WINDOW = 48


class WindowedRequests(Requests):
    """Requests of a model with sliding-window and full attention: they give back in one pool what left the window."""

    def __init__(self, allocator: Any) -> None:
        super().__init__(allocator)
        self.left: dict[int, int] = {}
        """Tokens of each request that have left the window: whole pages."""

    def leave_window(self) -> None:
        page_size = self.allocator.page_size
        for request, slots in self.slots.items():
            old = self.left.get(request, 0)
            new = max(old, (len(slots) - WINDOW) // page_size * page_size)
            self.allocator.free_swa_segment(slots[old:new], start_pos=old)
            self.left[request] = new

    def free(self, requests: list[int]) -> None:
        self.allocator.free_group_begin()
        for request in requests:
            slots, left = self.slots.pop(request), self.left.pop(request, 0)
            self.allocator.free_full_segment(slots[:left], start_pos=0)
            self.allocator.free_segment(slots[left:], start_pos=left)
        self.allocator.free_group_end()

    def check(self) -> None:
        super().check()
        mapping = self.allocator.full_to_swa_index_mapping
        sliding = [int(mapping[slot]) for r, slots in self.slots.items() for slot in slots[self.left.get(r, 0) :]]
        assert len(set(sliding)) == len(sliding)
        assert not sliding or min(sliding) >= self.allocator.page_size


def both_pools(page_size: int, sizes: tuple[int, int], blocks: tuple[Blocks, Blocks] | None) -> Any:
    """SGLang's allocator for a model with sliding-window and full attention, over elastic pools or over none."""
    pool = object.__new__(SWAKVPool)  # without buffers
    pool.full_kv_pool, pool.swa_kv_pool = (
        SimpleNamespace(kvlaunch_blocks=part) for part in (blocks if blocks is not None else (None, None))
    )
    return swa.SWATokenToKVPoolAllocator(*sizes, page_size, torch.bfloat16, "cpu", kvcache=pool, need_sort=False)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_counts_of_both_pools_are_those_of_stock_sglang(
    monkeypatch: pytest.MonkeyPatch, page_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    managers = (make_manager(1024), make_manager(768))
    sizes = (1023 * page_size, 767 * page_size)
    stock_allocator = both_pools(page_size, sizes, None)
    monkeypatch.setattr(swa, "TokenToKVPoolAllocator", ElasticTokenAllocator)
    monkeypatch.setattr(swa, "PagedTokenToKVPoolAllocator", ElasticPagedAllocator)
    blocks = (Blocks(managers[0], 3), Blocks(managers[1], 3))
    elastic_allocator = both_pools(page_size, sizes, blocks)
    assert [manager_blocks(part) for part in parts_of(elastic_allocator)] == list(blocks)
    pair = [WindowedRequests(elastic_allocator), WindowedRequests(stock_allocator)]
    refused = 0
    for step in range(200):
        for manager in managers:
            manager.step_scheduled()
        action, tokens = rng.random(), rng.randrange(1, 60 * page_size)
        dead = [r for r in pair[0].slots if rng.random() < 0.1]
        for requests in pair:
            if action < 0.35:
                done = requests.extend(step, tokens)
                assert done == (step in pair[0].slots)
                refused += not done
            elif action < 0.9:
                # SGLang sees that there is room before: what it takes in one pool only would be lost.
                if requests.allocator.available_size() >= page_size * len(requests.slots) > 0:
                    assert requests.decode()
                requests.leave_window()
            else:
                requests.free(dead)
        for size in ("available_size", "full_available_size", "swa_available_size"):
            assert getattr(elastic_allocator, size)() == getattr(stock_allocator, size)()
        for manager in managers:
            manager.step_finished()
    pair[0].check()
    pair[1].check()
    assert refused, "neither pool was ever full: this test would prove less"
    pair[0].free(list(pair[0].slots))
    assert [manager.in_use_blocks for manager in managers] == [0, 0]
    assert pair[0].extend(0, min(sizes))
    elastic_allocator.clear()
    assert (elastic_allocator.full_available_size(), elastic_allocator.swa_available_size()) == sizes
    for manager in managers:
        manager.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_full_pool_is_refused_and_nothing_is_taken(manager: KVCacheManager, page_size: int) -> None:
    requests = Requests(elastic(manager, page_size))
    assert requests.extend(0, requests.allocator.available_size())
    assert requests.allocator.available_size() == 0
    assert not requests.extend(1, 1)
    assert requests.extend(0, 0) if page_size > 1 else True
    requests.free([0])
    assert requests.allocator.available_size() == (manager.settings.num_blocks - 1) * page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_flush_takes_everything_back(manager: KVCacheManager, page_size: int) -> None:
    requests = Requests(elastic(manager, page_size))
    requests.extend(0, 100 * page_size)
    assert manager.stats().mapped_pages > 5
    requests.allocator.clear()
    assert requests.allocator.available_size() == (manager.settings.num_blocks - 1) * page_size
    manager.tick()
    while manager.stats().retiring_pages:
        manager.tick()
    assert manager.stats().mapped_pages == 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_under_a_limit_less_is_available_and_what_must_go_on_goes_on(manager: KVCacheManager, page_size: int) -> None:
    allocator = elastic(manager, page_size)
    blocks: Blocks = manager_blocks(allocator)
    requests = Requests(allocator)
    assert requests.extend(0, 100 * page_size)
    blocks.set_limit(4)  # 64 blocks, the null block among them
    assert allocator.available_size() == (63 - 100) * page_size
    assert blocks.withheld == 4095 - 63
    alone, two = [object()], [object(), object()]
    assert allocator.check_decode_capacity(num_tokens=page_size, tree_cache=None, requests=alone)
    assert not allocator.check_decode_capacity(num_tokens=page_size, tree_cache=None, requests=two)
    assert not allocator.check_decode_capacity(num_tokens=page_size, tree_cache=None)
    assert requests.extend(0, 28 * page_size), "a prefill under way ends its work"
    assert not requests.extend(0, 4000 * page_size)
    requests.free([0])
    assert allocator.available_size() == 63 * page_size
    manager.tick()
    assert manager.stats().mapped_pages - manager.stats().retiring_pages <= 4
    blocks.set_limit(None)
    assert allocator.available_size() == 4095 * page_size


def test_pages_stay_few_when_tokens_come_and_go(manager: KVCacheManager) -> None:
    """Stock SGLang hands slots out first in, first out, and touches all of them in time."""
    requests = Requests(elastic(manager, 1))
    for step in range(400):
        requests.extend(step, 50)
        if step >= 4:
            requests.free([step - 4])
    assert max(int(slot) for slots in requests.slots.values() for slot in slots) < 400


def test_a_rank_without_memory_is_named() -> None:
    def refuse(_request: object) -> None:
        raise OSError("nothing left")

    manager = make_manager(256, fault=refuse)
    requests = Requests(elastic(manager, 1))
    with pytest.raises(KVCommitError, match=r"Rank 3 .*nothing left") as caught:
        requests.extend(0, 100)
    assert list(caught.value.failures) == [3]
    manager.close()


def test_a_pool_of_sglangs_own_is_refused_by_name() -> None:
    class OtherPool:
        pass

    with pytest.raises(CompatibilityError, match="OtherPool"):
        ElasticTokenAllocator(10, torch.bfloat16, "cpu", kvcache=OtherPool(), need_sort=False)


def test_an_allocator_of_sglangs_own_is_refused_by_name() -> None:
    allocator = both_pools(1, (100, 80), None)
    with pytest.raises(CompatibilityError, match="TokenToKVPoolAllocator"):
        parts_of(allocator)


def test_an_attention_backend_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(CompatibilityError, match="not with SimpleNamespace"):
        attention.check(SimpleNamespace())


def test_a_window_is_read_where_its_own_pool_has_it() -> None:
    """Request 2 has its tokens in the full pool's slots 5, 6, 7, which are 105, 106, 107 of the window's pool."""
    pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda rows: rows + 100)
    backend = SimpleNamespace(use_sliding_window_kv_pool=True, token_to_kv_pool=pool)
    slots = torch.zeros(4, 8, dtype=torch.int64)
    slots[2, :3] = torch.tensor([5, 6, 7])
    given = (backend, "query", "output", "keys", "values", slots, torch.tensor([2]), torch.tensor([3]), "scaling")

    args, kwargs = attention._read_window(*given, sliding_window_size=4)  # type: ignore[arg-type]
    rows, indices = args[5], args[6]
    assert rows[indices[0], :3].tolist() == [105, 106, 107]
    assert args[:5] == given[:5]
    assert args[8:] == given[8:]
    assert kwargs == {"sliding_window_size": 4}

    args, _ = attention._read_window(*given)  # type: ignore[arg-type]
    assert args[5] is slots, "a layer of full attention reads as before"
