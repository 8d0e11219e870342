"""The documents name what there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from shared.messages import REGISTRY
from shared.settings import Settings, flag_of

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
MODULES = [
    path.relative_to(ROOT)
    for package in ("shared", "kernels", "services")
    for path in (ROOT / package).rglob("*.py")
    if not path.name.startswith("__")
]


def test_every_module_has_its_line() -> None:
    sections = dict(part.split("`\n", 1) for part in ARCHITECTURE.split("\n### `")[1:])
    listed = {
        Path(folder) / line.split("`")[1]
        for folder, text in sections.items()
        for line in text.splitlines()
        if line.startswith("- `")
    }
    assert listed == set(MODULES)


@pytest.mark.parametrize("kind", REGISTRY.values(), ids=lambda kind: kind.__name__)
def test_every_message_is_in_the_catalogue(kind: type) -> None:
    assert f"`{kind.__name__}`" in ARCHITECTURE


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda setting: setting.name)
def test_every_setting_is_in_the_table(setting: object) -> None:
    flag = flag_of(setting)  # type: ignore[arg-type]
    assert f"| `{flag}` |" in (ROOT / "docs/operations.md").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    tops = (ROOT / "README.md", ROOT / "SECURITY.md")
    for document in (*tops, *(ROOT / "docs").glob("*.md")):
        for part in document.read_text().split("](")[1:]:
            target = part.split(")", 1)[0].split("#")[0]
            if target and "://" not in target:
                assert (document.parent / target).exists(), (document.name, target)
