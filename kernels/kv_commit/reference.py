"""KV commit, row by row in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def reference_kv_commit(
    pages: npt.ArrayLike,
    rows: npt.ArrayLike,
    page_table: npt.ArrayLike,
    sequence: npt.ArrayLike,
    positions: npt.ArrayLike,
    valid: npt.ArrayLike,
) -> npt.NDArray[Any]:
    """A changed copy of `pages`; arguments as those of `api.kv_commit`, as host arrays."""
    out = np.array(pages)
    source, table = np.asarray(rows), np.asarray(page_table)
    owners, places, live = np.asarray(sequence), np.asarray(positions), np.asarray(valid)
    page_size = out.shape[3]
    for row in range(source.shape[1]):
        if not live[row]:
            continue
        page = table[owners[row], places[row] // page_size]
        for layer in range(source.shape[0]):
            out[layer, page, :, places[row] % page_size] = source[layer, row]
    return out
