"""Token masks as words: where a token's bit stands, and what no mask may be."""

from __future__ import annotations

import numpy as np
import pytest

from common.types import SamplingParams
from verify_service.batch import BatchShape, Bucket, pack
from verify_service.mask_share import unpack_share
from verify_service.step import SequenceWork
from verify_service.token_masks import MaskWords, num_mask_words, pack_mask

VOCAB = 70  # the third word has 6 tokens


def only(*tokens: int) -> MaskWords:
    allowed = np.zeros((1, VOCAB), bool)
    allowed[0, list(tokens)] = True
    return pack_mask(allowed)


def work(slot: int, num_nodes: int, mask: MaskWords | None) -> SequenceWork:
    return SequenceWork(
        slot=slot,
        tokens=np.arange(num_nodes, dtype=np.int32),
        parents=np.arange(-1, num_nodes - 1, dtype=np.int32),
        num_causal=1,
        samples=True,
        kv_len=0,
        page_ids=np.array([slot], np.int32),
        sampling=SamplingParams(),
        token_mask=mask,
    )


def test_a_tokens_bit_is_where_libraries_for_grammars_have_it() -> None:
    assert only(0, 33, 69).tolist() == [[1, 2, 1 << 5]]
    assert num_mask_words(VOCAB) == 3
    allowed = np.random.default_rng(0).random((5, VOCAB)) < 0.5
    np.testing.assert_array_equal(unpack_share(pack_mask(allowed), VOCAB, None), allowed)


def test_each_node_gets_its_own_row_and_all_others_any_token() -> None:
    shape = BatchShape(
        max_sequences=3, pages_per_sequence=1, ancestor_words=1, max_stop_tokens=1, max_depth=2
    )
    bucket = Bucket(8, 8, num_mask_words(VOCAB))
    mask = np.concatenate([only(5), only(40)])
    buffer = pack([work(0, 1, None), work(1, 2, mask), work(2, 1, None)], shape, bucket)
    rows = shape.packing(bucket).views(buffer)["token_mask"]
    np.testing.assert_array_equal(rows[1:3], mask)
    assert (rows[[0, *range(3, 8)]] == 0xFFFFFFFF).all()
    assert "token_mask" not in {field.name for field in shape.packing(Bucket(8, 8)).fields}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (only(3), r"must be uint32 \(2, 3\): a row for each node, a bit for each of 70 tokens"),
        (np.ones((2, 2), np.uint32), r"uint32 \(2, 2\) must be"),
        (np.ones((2, 3), np.int32), r"int32 \(2, 3\) must be"),
        (np.array([[0, 1, 0], [0, 0, 1 << 6]], np.uint32), "no token may follow node 1"),
    ],
)
def test_masks_that_cannot_be_are_refused(mask: MaskWords, message: str) -> None:
    with pytest.raises(ValueError, match=f"token_mask: .*{message}"):
        work(0, 2, mask).validate(VOCAB, 16)
