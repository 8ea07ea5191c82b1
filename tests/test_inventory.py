"""docs/inventory.md names 98 items, and every test and file that it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "inventory.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


@pytest.fixture(scope="module")
def tests():
    trees = (ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("test_*.py"))
    found = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in found if node.name.startswith("test_")}


def test_all_items_are_there_in_order():
    assert [int(row[0]) for row in ROWS] == list(range(1, 99))


def test_what_is_here_has_a_test_and_what_is_gone_a_reason(tests):
    for number, what, where, checks in ROWS:
        names = re.findall(r"`([^`]+)`", checks)
        wholly_gone = where.startswith("gone: ")
        assert wholly_gone or names or checks == "docs block", (number, what)
        for name in names:
            assert name in tests or (ROOT / name).is_file(), (number, name)


def test_files_that_are_named_are_there():
    for number, _, where, _ in ROWS:
        for name in re.findall(r"`(examples/[^`]+)`", where):
            assert (ROOT / name).exists(), (number, name)
        for page in re.findall(r"\]\(([^)#]+)", where):
            assert (ROOT / "docs" / page).is_file(), (number, page)
