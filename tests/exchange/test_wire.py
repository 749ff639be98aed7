"""A message is taken only if it is the next one that the other end of this connection sent."""

import pytest

from evenstep._exchange._wire import (
    HEARTBEAT,
    ProtocolError,
    Wire,
    check_versions,
    text_of,
)


def ends(key=b"key"):
    """Return both ends of a connection: the caller's, and rank 0's."""
    return Wire(key, is_caller=True), Wire(key, is_caller=False)


def sent(wire, *messages):
    """Return each of some messages as bytes."""
    return [wire.head(text) + text.data for text in map(text_of, messages)]


@pytest.mark.parametrize("is_up", [True, False])
def test_messages_come_through_in_both_directions(is_up):
    """Whole, with heartbeats among them."""
    caller, rank_0 = ends()
    one, other = (caller, rank_0) if is_up else (rank_0, caller)
    (first,) = sent(one, b"n 1")
    beat = one.head(HEARTBEAT)
    (second,) = sent(one, b"n 2")
    data, taken, at = first + beat + second, [], 0
    for _ in range(3):
        assert other.take(data[: at + 35], at) is None  # not complete
        said, at = other.take(data, at)
        taken.append(said)

    assert taken == [b"n 1", b"", b"n 2"]
    assert at == len(data)


def test_every_changed_byte_is_noticed():
    """Be it of the length, the tag or the text."""
    (message,) = sent(ends()[0], b"step 3")
    for position in range(2, len(message)):  # with the first two, it would be a longer message
        changed = bytearray(message)
        changed[position] ^= 1
        _, rank_0 = ends()
        with pytest.raises(ValueError, match="forged, changed"):
            rank_0.take(changed + bytes(300))


def forgeries():
    """Yield what is authentic, and what an attacker could put behind that."""
    caller, rank_0 = ends()
    first, second, third = sent(caller, b"n 1", b"n 2", b"n 3")
    (down,) = sent(rank_0, b"n 1")
    (foreign,) = sent(ends(b"another connection's")[0], b"n 1")
    yield pytest.param(first, first, id="repeated")
    yield pytest.param(b"", second, id="reordered")
    yield pytest.param(first, third, id="left out")
    yield pytest.param(b"", down, id="sent back")
    yield pytest.param(b"", foreign, id="another connection's")
    yield pytest.param(first, second[:4] + bytes(32) + second[36:], id="without a tag")


@pytest.mark.parametrize(("authentic", "forged"), [*forgeries()])
def test_what_is_not_the_next_message_is_refused(authentic, forged):
    """What came before it is taken."""
    _, rank_0 = ends()
    data = authentic + forged
    if authentic:
        assert rank_0.take(data)[0] == b"n 1"

    with pytest.raises(ValueError, match="forged, changed, repeated or out of order"):
        rank_0.take(data, len(authentic))


def test_a_message_that_claims_to_be_huge_is_refused_at_once():
    """Its text is not waited for, nor room made for it."""
    _, rank_0 = ends()

    with pytest.raises(ValueError, match="claims to have 4294967280 bytes"):
        rank_0.take(b"\xff\xff\xff\xf0" + bytes(40))


def test_unlike_versions_are_named_with_their_ranks():
    """And equal ones are no error."""
    check_versions({0: "1.0", 1: "1.0"})

    with pytest.raises(ProtocolError, match=r"got 1\.0 on ranks 0, 2 and 1\.1 on rank 1"):
        check_versions({0: "1.0", 1: "1.1", 2: "1.0"})
