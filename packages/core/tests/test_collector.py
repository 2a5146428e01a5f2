"""A test looks for garbage in what it has made, not in what all import: `pytest_collection` of the root conftest.py."""

from __future__ import annotations

import gc


def test_the_collector_leaves_modules_and_tests_alone():
    here = globals()
    assert gc.isenabled()
    assert not any(one is here for one in gc.get_objects())


def test_the_collector_still_finds_a_tests_own_garbage():
    made: list[object] = []
    made.append(made)
    kept = id(made)
    assert any(id(one) == kept for one in gc.get_objects())
    del made
    assert gc.collect() > 0
