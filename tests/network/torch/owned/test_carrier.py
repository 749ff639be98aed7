"""Tensors on their way, on ranks that are threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.network.torch._owned._agreement import Stamp, agree
from evenstep.network.torch._owned._carrier import Carrier, Parcel, chunks

from ..reduce.memory import MemoryTransport, Network, on_threads

few = settings(max_examples=max(1, settings.default.max_examples // 2))
FIELDS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64])),
    max_size=5,
)


def drawn(fields, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 99, (n,), generator=generator).to(kind) for n, kind in fields]


def carriers(world_size, function):
    """Run ``function(rank, carrier)`` on each rank."""
    network = Network()

    def go(rank):
        carrier = Carrier(MemoryTransport(network, rank, world_size), timeout_s=20)
        try:
            return function(rank, carrier)
        finally:
            carrier.close()

    return on_threads(world_size, go)


@few
@given(st.lists(FIELDS, min_size=2, max_size=4), st.integers(1, 90), st.booleans())
def test_everybody_gets_what_was_sent(fields, chunk_bytes, twice):
    """All of it, in any chunks, of several types, as often as it is done; and it is counted."""
    world_size = len(fields)
    sent = [drawn(each, rank) for rank, each in enumerate(fields)]
    num_bytes = [sum(each.nbytes for each in those) for those in sent]

    def go(rank, carrier):
        for _ in range(1 + twice):
            got = {p: [torch.zeros_like(each) for each in sent[p]] for p in carrier.peers}
            parcel = Parcel([each.clone() for each in sent[rank]], carrier.peers)
            carrier.carry([parcel], got, chunk_bytes=chunk_bytes)
        traffic = carrier.traffic
        assert traffic.sent_bytes == (1 + twice) * num_bytes[rank] * (world_size - 1)
        assert traffic.received_bytes == (1 + twice) * (sum(num_bytes) - num_bytes[rank])
        return all(torch.equal(a, b) for p in got for a, b in zip(got[p], sent[p], strict=True))

    assert all(carriers(world_size, go))


@given(FIELDS, st.integers(1, 90))
def test_chunks_are_all_of_it_and_no_larger(fields, chunk_bytes):
    """But for one that holds a single element larger than a chunk."""
    given_ = drawn(fields, 0)
    parts = chunks(given_, chunk_bytes)

    for part in parts:
        size = sum(each.nbytes for each in part)
        assert 0 < size <= max(chunk_bytes, part[0].itemsize)
    flat = [each for part in parts for each in part]
    whole = [value for each in given_ for value in each.tolist()]
    assert [value for each in flat for value in each.tolist()] == whole
    assert (
        len(parts)
        <= 2 * -(-sum(each.nbytes for each in given_) // max(chunk_bytes, 8)) + len(fields)
        or chunk_bytes < 8
    )


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("settings", [5, 6, 5], "On rank 11, `param_groups` has other settings"),
        ("epoch", [1, 2, 1], "On rank 10, 12, an older plan is in force"),  # the latest is right
        ("act", [0, 0, 2], "On rank 12, another method was called"),
    ],
)
def test_who_is_alone_with_something_is_named_by_all(name, values, named):
    """With its global rank, and nobody is left waiting."""

    def go(rank, carrier):
        fields = dict.fromkeys(
            ("act", "model", "epoch", "split", "new_split", "begun", "given", "settings"), 0
        )
        with pytest.raises(RuntimeError) as caught:
            agree(Stamp(**fields | {name: values[rank]}), carrier, (10, 11, 12))
        agree(Stamp(**fields), carrier, (10, 11, 12))
        return str(caught.value)

    assert all(said.startswith(named) for said in carriers(3, go))
