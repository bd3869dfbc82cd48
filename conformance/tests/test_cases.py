"""The case tables themselves: every known kind of fault is a case, and nothing stands in them twice."""

from __future__ import annotations

import re

import pytest
from b12x_conformance.cases import KINDS, attention, linear, moe

TABLES = {"linear": linear.PROBLEMS, "moe": moe.PROBLEMS, "attention": attention.PROBLEMS}


def test_every_kind_of_fault_is_a_case() -> None:
    ids = [problem.id for problems in TABLES.values() for problem in problems]
    found = {int(match[1]) for id in ids if (match := re.match(r"kind-(\d+)-", id))}
    assert found == set(KINDS)


@pytest.mark.parametrize("table", TABLES)
def test_ids_are_unique_and_plain(table: str) -> None:
    ids = [problem.id for problem in TABLES[table]]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9_.+-]+", id) for id in ids), ids


def test_tensors_of_a_case_depend_on_its_name_only() -> None:
    first, again, other = (
        linear.LinearProblem(name, "modelopt-nvfp4", (("o_proj", 32),), 64).build("cpu") for name in ("a", "a", "b")
    )
    assert first.case.tensors.keys() == other.case.tensors.keys()
    assert all(first.case.tensors[name].equal(again.case.tensors[name]) for name in ("o_proj.weight",))
    assert not first.case.tensors["o_proj.weight"].equal(other.case.tensors["o_proj.weight"])
