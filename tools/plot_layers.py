"""docs/layers.md's table and picture, out of what `benchmarks.layers` wrote.

    python -m tools.plot_layers RUN/layers.json docs/pictures/layers.png

The table goes to standard output, as Markdown. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Figures = Mapping[str, Mapping[str, Any]]
"""A variant's name → what was measured of it."""


def table(variants: Figures) -> list[str]:
    """A Markdown row for each variant, under two of heading."""
    suites = list(next(iter(variants.values()))["suites"])
    heading = ["variant", "parameters", "steps", "step, s", "held-out loss", *suites, "tree, ms"]
    rows = [heading, ["---"] * len(heading)]
    for name, found in variants.items():
        rows.append(
            [
                f"**{name}**",
                f"{found['parameters'] / 1e6:.1f} M",
                str(found["steps"]),
                f"{found['training_seconds'] / found['steps']:.2f}",
                " ".join(f"{loss:.2f}" for loss in found["validation"]["loss"]),
                *(f"{found['suites'][suite]['acceptance_length']:.3f}" for suite in suites),
                f"{found['tree_milliseconds']:.1f}",
            ]
        )
    return ["| " + " | ".join(row) + " |" for row in rows]


def picture(variants: Figures, path: Path) -> None:
    """Acceptance by depth, a panel for each suite."""
    suites = list(next(iter(variants.values()))["suites"])
    figure, panels = plt.subplots(
        1, len(suites), figsize=(4.2 * len(suites), 3.6), sharey=True, squeeze=False
    )
    for panel, suite in zip(panels[0], suites, strict=True):
        for name, found in variants.items():
            shares = found["suites"][suite]["per_depth"]
            panel.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=name)
        panel.set_title(suite, fontsize=10)
        panel.set_xlabel("depth of the node")
        panel.set_xticks(range(1, len(shares) + 1))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accepted, if the one above was")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="layers.json of a run")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    variants = json.loads(arguments.figures.read_text())["variants"]
    print("\n".join(table(variants)))
    picture(variants, arguments.picture)


if __name__ == "__main__":
    main()
