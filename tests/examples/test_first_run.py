"""docs/first_run.md names what is there: its flags, its files, its pictures."""

import re
from pathlib import Path

import pytest

from arguments import parse

PAGE = Path(__file__).parents[2] / "docs" / "first_run.md"
ROOT = PAGE.parents[1]
OF_OTHERS = {"--nproc-per-node", "--max-restarts", "--help"}  # torchrun's, and every program's


def test_every_flag_exists(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    there = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE.read_text())) - OF_OTHERS
    assert len(named) > 12
    assert named <= there


def test_every_command_can_be_parsed():
    text = PAGE.read_text().replace("\\\n", " ")
    commands = re.findall(r"^\$ .*examples/train\.py(.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    for flags in commands:
        parse(flags.split())


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text()))
def test_every_link_leads_somewhere(target):
    file = PAGE.parent / target
    assert file.exists()
    if file.suffix == ".png":
        assert 5_000 < file.stat().st_size < 100_000


def test_every_file_that_it_runs_exists():
    names = re.findall(r"(?:examples|tests|docs)/[\w/.-]*\w\.(?:py|sh|md|txt)", PAGE.read_text())
    assert "examples/train.py" in names
    for name in names:
        assert (ROOT / name).exists(), name


def test_its_pictures_are_those_of_a_report():
    shown = re.findall(r"!\[[^\]]+\]\(first_run/(\w+)\.png\)", PAGE.read_text())
    assert sorted(shown) == ["gradients", "loss", "schedule", "speed"]
