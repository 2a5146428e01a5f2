"""The memory pools of a run, by name: all users of a name share one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sley_core.errors import PlanError
from sley_core.words import suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.protocols import MemoryPool


class Pools:
    """Makes each pool when it is first asked for: that of a table `[pools.NAME]`, or of a record with its defaults.

    tables: the plan's `[pools]`. build: makes the pool of a record. made: the pools made so far, by name.
    """

    def __init__(self, tables: Mapping[str, Any], build: Callable[[str], MemoryPool]) -> None:
        self._tables = tables
        self._build = build
        self.made: dict[str, MemoryPool] = {}

    def __call__(self, name: str) -> MemoryPool:
        """Returns the pool of the table `[pools.name]`, or of the record `name`, as `isp.slots`.

        Raises PlanError `unknown-name` or `unknown-record`, and PluginError for a plugin that cannot be loaded.
        """
        if name not in self.made:
            if name in self._tables:
                self.made[name] = self._tables[name].build()
            elif "." in name:
                self.made[name] = self._build(name)
            else:
                hint = suggestion(name, self._tables, 'add it to the plan, or name a record, "plugin.record"')
                raise PlanError("unknown-name", f"the plan has no table [pools.{name}]", hint=hint)
        return self.made[name]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that the pools report, named `pool.what`."""
        for name, pool in self.made.items():
            yield from ((f"{name}.{what}", tensor) for what, tensor in pool.held())

    def labels(self) -> Mapping[str, MemoryPool]:
        """Returns the pools by what a plan calls them: `pools.NAME`, or the name of a record."""
        return {name if "." in name else f"pools.{name}": pool for name, pool in self.made.items()}
