"""One name, one thing: a class of this repository has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODELS = ("testing", "sley_testing", "llama.py")
"""Models have a `Block` and a `Head` each, as they have everywhere."""


@pytest.mark.skipif(not (ROOT / "packages" / "dp").exists(), reason="the other packages are not part of the sdist")
def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for file in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]:
        if not set(MODELS) & set(file.parts):
            for node in ast.parse(file.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 200
    assert not {name: where for name, where in places.items() if len(where) > 1}
