"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_architecture_names_real_code() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    references = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)(?::([A-Za-z_.]+))?`", text)
    assert len(references) > 25
    missing = []
    for file, name in references:
        source = ROOT / file
        code = source.read_text(encoding="utf-8") if source.exists() else ""
        names = name.split(".") if name else []
        if not code or not all(re.search(rf"\b(class|def) {part}\b", code) for part in names):
            missing.append(f"{file}:{name}")
    assert missing == []
