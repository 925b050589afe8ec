"""The seed of one choice of a request: the request's own, mixed with the choice's index.

On the host and without a device, for it is needed once for each sequence.
`kernels.noise.mix_choice` is the same function on words.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_of_choice(seed: int, choice_index: int) -> int:
    """Choice 0 keeps the seed, so that it is the same text whether or not there are others.

    `seed` in [0, 2**64), `choice_index` in [0, 2**32).
    """
    if choice_index == 0:
        return seed
    lo, hi = _threefry2x32((seed & _WORD, seed >> 32), (choice_index, _WORD))
    return hi << 32 | lo


def _threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x0, x1 = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for block in range(5):
        for bits in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = ((x1 << bits | x1 >> (32 - bits)) & _WORD) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & _WORD
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _WORD
    return x0, x1
