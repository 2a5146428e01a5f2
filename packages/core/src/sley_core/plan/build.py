"""Writes plans from Python, as for a sweep. A draft is never run itself: what is run, kept and compared is a file.

    base = draft("base.toml")
    for lr in (1e-3, 3e-3):
        base.set(run={"name": f"lr-{lr}"}, optimizer={"lr": lr}).write(f"sweep/lr-{lr}.toml")

Each file has `extends = "../base.toml"`, and otherwise only what it changes. It is checked before it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sley_core.errors import KeyPath, PlanError, UsageError, dotted
from sley_core.json_text import write_whole
from sley_core.plan.check import check_plan
from sley_core.plan.document import plain
from sley_core.plan.extends import KEY, joined
from sley_core.plan.load import plan_from_text
from sley_core.plan.plan import Plan
from sley_core.plan.tables import FORMAT
from sley_core.plan.write import inline, leaves, sections
from sley_core.table import written


@dataclass(frozen=True)
class PlanDraft:
    """What a plan is to say, beside what its base says. Never changed: `set` returns another.

    tables: as TOML has them; arrays of tables are lists of dicts. base: the plan that it extends; None where it stands alone.
    """

    tables: Mapping[str, Any] = field(default_factory=dict)
    base: Path | None = None

    def set(self, **tables: Any) -> PlanDraft:
        """Returns the draft with these tables in it, merged key by key as `extends` does: arrays, and tables that name another
        `use` or `factory`, take the place of what was there. Raises UsageError "not-toml" for a value without a form in TOML.
        """
        for path, value in leaves(tables):
            _check_toml(path, value)
        return replace(self, tables=joined(plain(tables), dict(self.tables)))

    def text(self, folder: str | Path) -> str:
        """Returns the plan as TOML, for a file in `folder`."""
        extends = {} if self.base is None else {KEY: written(Path(os.path.relpath(self.base, folder)).as_posix())}
        tables = {**extends, "plan": FORMAT, **self.tables}
        return "\n".join(sections(tables))

    def write(self, path: str | Path, *, world: int | None = None) -> Plan:
        """Writes the plan at `path`, over a file that is there, and returns it as it would be loaded. Relative paths in it
        start in its folder, those of the base in the base's.

        world: the number of ranks that it must run on; left out, what the plan says. Raises PlanError with all problems, each
        with its place in the text that would have been written, and then writes nothing.
        """
        file = Path(path)
        text = self.text(file.absolute().parent)
        plan = plan_from_text(text, str(file), file.absolute().parent)
        if problems := check_plan(plan, plan.world() if world is None else world):
            raise PlanError.many(problems)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        return plan


def draft(base: str | Path | None = None, **tables: Any) -> PlanDraft:
    """Returns the draft of a plan that extends `base`, a file, or stands alone, and says `tables`: `run={"steps": 5}`."""
    return PlanDraft(base=None if base is None else Path(base).absolute()).set(**tables)


def _check_toml(path: KeyPath, value: Any) -> None:
    """Raises UsageError "not-toml" for a value without a form in TOML, None included."""
    try:
        if value is not None:
            inline(plain(value))
            return
    except TypeError:
        pass
    hint = "a key that is to have its default is left out"
    raise UsageError("not-toml", f"`{dotted(path)}` is {value!r}, for which TOML has no form", hint=hint)
