"""Each id of FAULTS.md is carried by a test, and the other way round."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_fault_has_a_test():
    listed = re.findall(r"^\| ([A-Z]\d\d) \|", (HERE / "FAULTS.md").read_text(), re.M)
    tested = {
        id_
        for file in HERE.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
        for id_ in re.findall(r"(?<![A-Z0-9])([A-Z]\d\d)(?=_|$)", name)
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == tested
