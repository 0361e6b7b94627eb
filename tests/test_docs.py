"""What the documentation says of the tests is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_known_faults_name_every_test_that_carries_their_id_and_no_other() -> None:
    rows = dict(re.findall(r"^\| (B\d+) \| .*? \| (.*) \|$", (ROOT / "docs/known-faults.md").read_text(), re.MULTILINE))
    assert len(rows) > 40
    named = {(fault, file, test) for fault, held_by in rows.items() for file, test in _tests(held_by)}
    carried = {
        (fault.upper(), str(path.relative_to(ROOT)), test)
        for path in (ROOT / "tests").rglob("*.py")
        for test in re.findall(r"def (test_\w+)", path.read_text())
        for fault in re.findall(r"_(b\d{2})(?=_|$)", test)
    }
    there = {(file, test) for _, file, test in named}
    assert carried - named == set()
    assert {test for file, test in there if f"def {test}(" not in (ROOT / file).read_text()} == set()


def _tests(held_by: str) -> list[tuple[str, str]]:
    """(file, test) of a row."""
    groups = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", held_by)
    return [(file, test) for file, names in groups for test in re.findall(r"`(test_\w+)`", names)]
