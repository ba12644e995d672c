"""The plan by which several processes send their shards: a pure function, by its laws."""

from __future__ import annotations

import itertools
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridges.api import BridgeError, ParamMeta
from bridges.proof.byte_digest import host_digest, place
from bridges.vllm_plugin import pieces

TYPES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list:
    """The cuts of a tensor into equal parts along each axis."""
    edges = [[(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(shape, parts)]
    return list(itertools.product(*edges))


@st.composite
def tensors(draw, copies):
    """(meta, who holds what): `copies` replicas of a learner, each of which divides the tensor alike."""
    shape = tuple(n * 8 for n in draw(st.lists(st.integers(1, 4), max_size=2)))
    parts = tuple(draw(st.sampled_from([1, 2, 4])) for _ in shape)
    boxes = grid(shape, parts)
    processes = draw(st.integers(1, len(boxes)))
    held = [(copy * processes + i % processes, box) for copy in range(copies) for i, box in enumerate(boxes)]
    return ParamMeta("x", draw(st.sampled_from(sorted(TYPES))), shape), tuple(draw(st.permutations(held)))


def ranks_of(shape: tuple[int, ...]) -> list[list]:
    """The cuts of the ranks of engines: whole, by rows, by columns, and by rows that two ranks share."""
    by_rows = grid(shape, (2,) * len(shape[:1]) + (1,) * len(shape[1:]))
    by_columns = grid(shape, (1,) * len(shape[:-1]) + (4,) * len(shape[-1:]))
    return [[tuple((0, n) for n in shape)], by_rows + by_rows, by_columns]


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_byte_of_every_rank_is_written_once_by_one_who_holds_it(data):
    drawn = data.draw(st.lists(tensors(data.draw(st.integers(1, 3))), min_size=1, max_size=5))
    metas, held = [m for m, _ in drawn], [h for _, h in drawn]
    sent = pieces.senders_of(metas, held)
    assert pieces.unpacked(json.loads(json.dumps(pieces.packed(sent)))) == sent, "both sides know the same"
    slot = data.draw(st.sampled_from([256, 700, 10**6]))
    plan = pieces.plan(metas, sent, slot)
    written = [[np.zeros(pieces.shape_of(cut), int) for cut in cuts] for m in metas
               for cuts in ranks_of(m.shape)]
    for sender, bucket in ((s, b) for s, buckets in plan.items() for b in buckets):
        end = 0
        for piece in bucket:
            assert piece.at % pieces.ALIGN == 0 and end <= piece.at and piece.at + piece.nbytes <= slot
            end = piece.at + piece.nbytes
            meta = metas[piece.tensor]
            assert (sender, piece.box) in held[piece.tensor], "who sends it holds it"
            assert piece.nbytes == math.prod(pieces.shape_of(piece.cut)) * TYPES[meta.dtype]
            for tables, cuts in zip(written[3 * piece.tensor :], ranks_of(meta.shape)):
                for table, cut in zip(tables, cuts):
                    if found := pieces.overlap(piece.cut, cut) if cut else ():
                        table[pieces.taken(found, cut)] += 1
                    elif not cut:
                        table[()] += 1
    assert all((table == 1).all() for tables in written for table in tables)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 40))
def test_what_all_hold_is_sent_by_each_in_turn(processes, tensors):
    metas = [ParamMeta(f"x{i}", "float32", (1 + i % 3, 8)) for i in range(tensors)]
    sent = pieces.senders_of(metas, [[(p, pieces.whole(m)) for p in range(processes)] for m in metas])
    load = {p: sum(math.prod(m.shape) for m, [(s, _)] in zip(metas, sent) if s == p)
            for p in range(processes)}
    assert max(load.values()) - min(load.values()) <= 24, "no more than the largest tensor"


@pytest.mark.parametrize("boxes", [[((0, 4), (0, 8))], [((0, 5), (0, 8)), ((4, 8), (0, 8))],
                                   [((0, 4), (0, 8)), ((4, 8), (0, 4))]])
def test_boxes_that_do_not_make_up_a_tensor_are_refused(boxes):
    with pytest.raises(BridgeError,
                       match="x .8, 8.: the learner's processes hold .* which do not make it up"):
        pieces.senders_of([ParamMeta("x", "bfloat16", (8, 8))], [[(0, box) for box in boxes]])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_digests_of_parts_add_up_to_that_of_what_a_rank_holds(data):
    meta, held = data.draw(tensors(1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    array = rng.integers(0, 120, meta.shape).astype(np.dtype(getattr(ml_dtypes, meta.dtype, meta.dtype)))
    # a quarter of the columns, which the learner or the ranks hold, ends at a whole word
    assume(not meta.shape or meta.shape[-1] * array.itemsize % 16 == 0)
    for cuts in ranks_of(meta.shape):
        for cut in cuts:
            total = np.zeros(2, np.uint32)
            for _, box in held:
                if (part := pieces.overlap(box, cut)) is not None:
                    total += host_digest(array[pieces.taken(part)], place(part, cut, array.itemsize))
            assert total.tolist() == host_digest(array[pieces.taken(cut)]).tolist()


def test_a_box_that_ends_within_a_word_cannot_be_proved():
    with pytest.raises(ValueError, match="do not end at whole words of 4 bytes"):
        place(((0, 2), (0, 3)), ((0, 2), (0, 8)), 2)
    with pytest.raises(ValueError, match="between the first and the last"):
        place(((0, 2), (0, 1), (0, 8)), ((0, 2), (0, 2), (0, 8)), 2)
    assert place(((1, 2), (5, 7)), ((1, 2), (0, 7)), 4) == (5, 7), "a row's last word may be padded"


@pytest.mark.parametrize("slot_bytes", [256, 1000, 4096, 10**6])
def test_a_plan_holds_every_row_once(slot_bytes):
    metas = [ParamMeta("a", "bfloat16", (17, 30)), ParamMeta("b", "float32", ()),
             ParamMeta("c", "float8_e4m3fn", (9, 8)),
             ParamMeta("d", "float32", (40,))]
    plan = pieces.plan(metas, sent := [[(0, pieces.whole(m))] for m in metas], slot_bytes)[0]
    rows = {i: [] for i in range(len(metas))}
    for bucket in plan:
        end = 0
        for piece in bucket:
            assert piece.at % pieces.ALIGN == 0 and piece.at >= end and piece.at + piece.nbytes <= slot_bytes
            end = piece.at + piece.nbytes
            rows[piece.tensor] += range(piece.first, piece.first + piece.rows)
    assert rows == {i: list(range(m.shape[0] if m.shape else 1)) for i, m in enumerate(metas)}
    with pytest.raises(BridgeError, match="a row of 60 bytes does not fit into a slot of 59"):
        pieces.plan(metas[:1], sent, 59)
