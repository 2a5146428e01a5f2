"""`pp.link` holds the contract of stage links."""

from __future__ import annotations

from typing import Any, ClassVar

from sley_testing.link_contract import StageLinkContract


class TestLink(StageLinkContract):
    link: ClassVar[dict[str, Any]] = {"use": "pp.link"}
