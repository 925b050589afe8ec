"""Draws a round's draft tree in the terminal: what was guessed, what the target took."""

from __future__ import annotations

import math

from rich.text import Text
from rich.tree import Tree

from canopy.results import Round


def draw_round(played: Round) -> Tree:
    """The tree of one round; accepted nodes are ticked, the bonus hangs where the walk ended.

    The figure beside a node is the drafter's probability of the whole path to it.
    """
    accepted = set(played.accepted_nodes)
    end = played.accepted_nodes[-1] if played.accepted_nodes else 0
    seconds = (
        f"draft {played.draft_seconds * 1e3:.1f} ms, verify {played.verify_seconds * 1e3:.1f} ms"
    )
    title = Text(f"round {played.number}  ", style="bold")
    title.append(f"{len(accepted)} of {len(played.tokens) - 1} accepted, 1 bonus  ", style="none")
    title.append(seconds, style="dim")
    whole = Tree(title, guide_style="dim")
    branches: list[Tree] = []
    for node, parent in enumerate(played.parents):
        above = whole if node == 0 else branches[parent]
        branches.append(above.add(_label(played, node, node in accepted)))
    bonus = Text(f"+ {_quoted(played.bonus_text)}", style="bold yellow")
    branches[end].add(bonus.append("  bonus", style="not bold dim"))
    return whole


def _label(played: Round, node: int, is_accepted: bool) -> Text:
    text = _quoted(played.texts[node])
    if node == 0:
        return Text(text, style="bold")
    share = f"  {100 * math.exp(min(played.scores[node], 0.0)):.0f} %"
    label = Text(f"✓ {text}", style="bold green") if is_accepted else Text(text, style="dim")
    return label.append(share, style="not bold dim")


def _quoted(text: str) -> str:
    """Visible blanks and line ends, one line."""
    return repr(text)
