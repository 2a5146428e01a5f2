"""The reference of plans in the documentation lists every key."""

import re
from pathlib import Path

import pytest
from reference_pages import plan_page, rows

from sley_core.plan.loader import PluginLoader, find_plugins
from sley_core.plan.tables import OPTIONAL_TABLES, TABLES
from sley_core.records import import_object


def test_the_page_in_the_documentation_is_up_to_date() -> None:
    page = next((folder / "docs" for folder in Path(__file__).parents if (folder / "docs").is_dir()), None)
    if page is None:
        pytest.skip("the documentation is not beside the package")
    written = (page / "plan.md").read_text("utf-8")
    assert written == plan_page(), "run: python .ci/reference_pages.py plan > docs/plan.md"


def test_every_key_has_a_type_and_a_meaning() -> None:
    core = PluginLoader(plugins={}).load("core")
    records = [record.config for record in core.records.values()]
    for model in (*TABLES.values(), *OPTIONAL_TABLES.values(), *records):
        assert model.__doc__
        for row in rows(model):
            assert row.meaning.endswith("."), (model, row)
            assert row.takes not in ("a value", ""), (model, row)


def test_each_object_that_a_record_names_can_be_imported() -> None:
    loader = PluginLoader()
    references = {
        value: record.name
        for plugin in find_plugins()
        for record in loader.load(plugin).records.values()
        for value in vars(record).values()
        if isinstance(value, str) and re.fullmatch(r"sley_[\w.]+:\w+", value)
    }
    assert len(references) > 40
    for reference in references:
        assert callable(import_object(reference)), reference
