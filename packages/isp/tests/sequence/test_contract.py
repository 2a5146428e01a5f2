"""`isp.all_to_all` holds the contract of sequence attentions."""

from __future__ import annotations

from typing import Any, ClassVar

from sley_testing.attention_contract import SequenceAttentionContract


class TestAllToAll(SequenceAttentionContract):
    sequence: ClassVar[dict[str, Any]] = {"use": "isp.all_to_all"}
