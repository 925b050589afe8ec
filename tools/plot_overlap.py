"""docs/overlap.md's picture, out of what `benchmarks.overlap` printed.

    python -m benchmarks.overlap > made_up.txt
    python -m benchmarks.overlap --recorded FILE > recorded.txt
    python -m tools.plot_overlap made_up.txt recorded.txt docs/pictures/overlap.png

A panel for each run: tokens/s over root-only against the round trip, by batch. Needs matplotlib
(the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WAYS = {
    "sync": ("without draft-ahead", "--"),
    "ahead": ("draft-ahead alone", ":"),
    "auto": ("the gate's choice", "-"),
}


def read(path: Path) -> Mapping[str, Any]:
    """The last line of a run. Raises ValueError if it is of another benchmark."""
    run: dict[str, Any] = json.loads(path.read_text().strip().splitlines()[-1])
    if run.get("benchmark") != "overlap":
        raise ValueError(f"{path}: its last line is no JSON of benchmarks.overlap")
    return run


def title(run: Mapping[str, Any]) -> str:
    text = "made-up chances" if run["recorded"] is None else "recorded text and head"
    return f"{run['costs']['name']}\n{text}, depth {run['depth']}, {run['max_nodes']} nodes"


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4.2 * len(runs) + 2.4, 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, run in zip(panels[0], runs, strict=True):
        batches = sorted({cell["batch"] for cell in run["cells"]})
        for number, batch in enumerate(batches):
            cells = [cell for cell in run["cells"] if cell["batch"] == batch]
            for name, (_, line) in WAYS.items():
                panel.plot(
                    [cell["rtt_ms"] for cell in cells],
                    [cell[name]["over_root_only"] for cell in cells],
                    line, color=f"C{number}", marker=".", label=f"batch {batch}, {WAYS[name][0]}",
                )  # fmt: skip
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_title(title(run), fontsize=9)
        panel.set_xlabel("round trip to the draft, ms")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s over root-only (SIMULATED)")
    fullest = max(panels[0], key=lambda panel: len(panel.lines))
    handles, labels = fullest.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="what benchmarks.overlap printed")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    picture([read(path) for path in arguments.runs], arguments.picture)


if __name__ == "__main__":
    main()
