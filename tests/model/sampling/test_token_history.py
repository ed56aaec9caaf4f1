"""The tail's token history against lists: overwritten by position, copied, trimmed, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardnet.model.sampling.penalties import TokenHistory
from shardnet.types import SlotId

SLOTS = st.integers(0, 2).map(SlotId)


@given(data=st.data())
def test_a_slot_holds_what_was_written_last(data: st.DataObject) -> None:
    history, plain = TokenHistory(), dict[SlotId, list[int]]()
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(SLOTS)
        held = plain.setdefault(slot, [])
        match data.draw(st.sampled_from(["write", "copy", "trim"])):
            case "write":
                position = data.draw(st.integers(0, len(held)))
                tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
                tokens *= data.draw(st.sampled_from([1, 200]))
                history.write(slot, position, tokens)
                held[position : position + len(tokens)] = tokens
            case "copy":
                source = data.draw(SLOTS.filter(lambda other, slot=slot: other != slot))
                kept = plain.get(source, [])
                n_kept = data.draw(st.integers(0, len(kept)))
                history.copy(source, slot, n_kept)
                plain[slot] = kept[:n_kept]
            case "trim":
                n_kept = data.draw(st.integers(0, len(held)))
                history.trim(slot, n_kept)
                del held[n_kept:]
        for slot, tokens in plain.items():
            assert history.tokens(slot, len(tokens)).tolist() == tokens


def test_a_copy_is_not_changed_with_its_source() -> None:
    history = TokenHistory()
    history.write(SlotId(0), 0, [1, 2, 3])
    history.copy(SlotId(0), SlotId(1), 2)
    history.write(SlotId(0), 0, [9])
    assert history.tokens(SlotId(1), 2).tolist() == [1, 2]


def test_a_trimmed_slot_gives_memory_back() -> None:
    history, slot = TokenHistory(), SlotId(0)
    history.write(slot, 0, range(8000))
    large = history.tokens(slot, 9000).size
    history.trim(slot, 10)
    assert history.tokens(slot, 9000).size < large / 10
    history.trim(slot, 0)
    assert history.tokens(slot, 9000).size == 0
