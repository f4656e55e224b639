"""The mutants must fit the code, or `make mutants` would try nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_changes_what_it_says(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(before := (ROOT / mutant.file).read_text())
    apply(mutant, tmp_path)
    assert copy.read_text() != before
