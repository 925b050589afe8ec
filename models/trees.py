"""Nested dicts of parameters as flat lists of (path, leaf), and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.layers import Params


def flatten(tree: Params, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def unflatten(leaves: dict[tuple[str, ...], Any]) -> Params:
    """The nested dict of (path, leaf): the inverse of `flatten`."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
