"""The mutations still fit the code: a rule that moved takes its mutation along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_its_file_and_names_tests_that_exist(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, copy)
    mutation.apply(tmp_path)
    assert copy.read_text() != (ROOT / mutation.file).read_text()
    compile(copy.read_text(), mutation.file, "exec")
    assert all((ROOT / test).is_file() for test in mutation.tests)
