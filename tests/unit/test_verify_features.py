from __future__ import annotations

import numpy as np
import pytest

from verify_service.features import FeatureWindow


def rows(first: int, num: int) -> np.ndarray:
    return np.arange(first, first + num, dtype=np.float32).reshape(num, 1)


def taken(window: FeatureWindow, max_rows: int = 100) -> list[tuple[int, list[float]]]:
    pieces = []
    while (piece := window.take(max_rows)) is not None:
        pieces.append((piece[0], piece[1][:, 0].tolist()))
    return pieces


def test_rows_come_out_once_and_in_order() -> None:
    window = FeatureWindow(100)
    window.append(0, rows(0, 3))
    window.append(3, rows(3, 2))
    assert taken(window, max_rows=2) == [(0, [0, 1]), (2, [2]), (3, [3, 4])]
    assert window.num_waiting == 0


def test_recomputed_rows_are_not_sent_again() -> None:
    window = FeatureWindow(100)
    window.append(0, rows(0, 4))
    taken(window)
    window.append(0, rows(0, 3))
    window.append(3, rows(3, 3))
    assert taken(window) == [(4, [4, 5])]


def test_gap_is_an_error() -> None:
    window = FeatureWindow(100)
    window.append(0, rows(0, 2))
    with pytest.raises(ValueError, match="jump from position 2 to 3"):
        window.append(3, rows(3, 1))


def test_oldest_rows_fall_out_and_replay_starts_at_the_oldest_held() -> None:
    window = FeatureWindow(8)
    for position in range(20):
        window.append(position, rows(position, 1))
    assert (window.start, window.end) == (12, 20)
    window.rewind(0)
    assert taken(window)[0] == (12, [12])


def test_prompt_longer_than_the_window_keeps_its_end() -> None:
    window = FeatureWindow(8)
    window.append(0, rows(0, 30))
    assert taken(window) == [(22, list(range(22, 30)))]


def test_cut_rows_are_sent_anew() -> None:
    window = FeatureWindow(100)
    window.append(0, rows(0, 6))
    taken(window)
    window.cut(4)
    window.append(4, rows(104, 2))
    assert taken(window) == [(4, [104, 105])]


def test_cut_below_what_is_held_starts_over_there() -> None:
    window = FeatureWindow(4)
    window.append(0, rows(0, 12))
    window.cut(5)
    window.append(5, rows(5, 1))
    assert taken(window) == [(5, [5])]


def test_window_does_not_keep_a_steps_array_alive() -> None:
    window = FeatureWindow(100)
    step = rows(0, 50)
    window.append(0, step[:2])
    step[:] = -1
    assert taken(window) == [(0, [0, 1])]


@pytest.mark.parametrize("known", [0, 2, 4, 7])
def test_rows_of_another_are_added_to_those_that_are_here(known: int) -> None:
    """A choice that had found some by content, and then takes over the first one's."""
    other, window = FeatureWindow(100), FeatureWindow(100)
    other.append(0, rows(0, 4))
    other.append(4, rows(4, 5))
    window.append(0, rows(0, known))
    window.take_over(other, 7)
    assert (window.start, window.end) == (0, 7)
    assert [row for _, piece in taken(window) for row in piece] == list(range(7))
    window.append(7, rows(7, 1))
    assert taken(window) == [(7, [7])]


def test_rows_of_another_begin_anew_where_it_has_lost_the_older_ones() -> None:
    other, window = FeatureWindow(4), FeatureWindow(100)
    for position in range(0, 12, 2):
        other.append(position, rows(position, 2))
    window.append(0, rows(0, 2))
    window.take_over(other, 10)
    assert (window.start, window.end) == (8, 10)
    assert taken(window) == [(8, [8, 9])]
