import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qarl.ops.reference import KVCodes
from qarl.rollout.cache import PAGE, KVCache, Region, bytes_per_token, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_a_part_of_a_page_is_a_page(tokens: int, pages: int):
    assert pages_for(tokens) == pages


def test_rows_run_through_the_pages_in_order():
    region = Region([5, 2])
    assert region.next_rows(PAGE - 1) == list(range(5 * PAGE, 6 * PAGE - 1))
    assert region.next_rows(2) == [6 * PAGE - 1, 2 * PAGE]
    assert region.length == PAGE + 1
    assert region.spans() == [(5 * PAGE, PAGE), (2 * PAGE, 1)]


def test_neighbouring_pages_are_one_span_and_unwritten_pages_none():
    assert Region([3, 4, 7, 8], length=2 * PAGE + 6).spans() == [(3 * PAGE, 2 * PAGE), (7 * PAGE, 6)]
    assert Region([4, 3], length=2 * PAGE).spans() == [(4 * PAGE, PAGE), (3 * PAGE, PAGE)]
    assert Region([3], length=0).spans() == []


def test_the_bytes_are_those_of_the_stores(small):
    assert bytes_per_token(small.config) == 2 * 4 * 2 * 2 * 32  # k and v, fp32, layers, heads, head size
    cache = KVCache(small.config, num_pages=3)
    stores = [store for store in (*cache.keys, *cache.values) if isinstance(store, torch.Tensor)]
    assert len(stores) == 2 * small.config.num_layers
    assert len({store.data_ptr() for store in stores}) == len(stores)
    assert sum(store.numel() * store.element_size() for store in stores) == 3 * PAGE * bytes_per_token(small.config)


def test_an_int8_cache_takes_a_byte_a_number_and_a_scale_a_head(small):
    assert bytes_per_token(small.config, "int8") == 2 * 2 * 2 * (32 + 4)
    cache = KVCache(small.config, num_pages=3, kv="int8")
    stores = [store for store in (*cache.keys, *cache.values) if isinstance(store, KVCodes)]
    parts = [part for store in stores for part in (store.codes, store.scales)]
    assert sum(part.numel() * part.element_size() for part in parts) == 3 * PAGE * bytes_per_token(small.config, "int8")


def test_a_region_takes_its_pages_and_gives_them_back(small):
    cache = KVCache(small.config, num_pages=4)
    first, second = cache.reserve(PAGE + 1), cache.reserve(1)
    assert (len(first.pages), len(second.pages), cache.free_pages) == (2, 1, 1)
    assert not set(first.pages) & set(second.pages)
    with pytest.raises(AssertionError, match="more than the cache holds"):
        cache.reserve(2 * PAGE)
    first.next_rows(3)
    cache.release(first)
    assert cache.free_pages == 3
    assert (first.pages, first.length) == ([], 0)
    cache.release_all()
    assert cache.free_pages == 4


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PAGE)), max_size=40))
def test_no_page_has_two_owners_and_none_is_lost(small, steps):
    cache = KVCache(small.config, num_pages=8)
    held: list[Region] = []
    for reserves, tokens in steps:
        if reserves and pages_for(tokens) <= cache.free_pages:
            held.append(cache.reserve(tokens))
        elif held:
            cache.release(held.pop(tokens % len(held)))
        owned = [page for region in held for page in region.pages]
        assert len(owned) == len(set(owned)) == cache.num_pages - cache.free_pages
        assert set(owned) <= set(range(8))


def test_rows_written_through_a_region_are_those_its_spans_read(small):
    cache = KVCache(small.config, num_pages=6)
    blocker = cache.reserve(2 * PAGE)
    late = cache.reserve(1)
    cache.release(blocker)
    region = cache.reserve(4 * PAGE)
    assert not set(region.pages) & set(late.pages)
    store = cache.keys[0]
    assert isinstance(store, torch.Tensor)
    for position in range(3 * PAGE + 5):
        store[region.next_rows(1)] = float(position)
    read = torch.cat([store[first : first + length, 0, 0] for first, length in region.spans()])
    assert read.tolist() == list(range(3 * PAGE + 5))
