"""Formats the result of a search as text: a table, two layouts compared, and the plan file of the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.plan.write import sections
from sley_estimate.commands.estimate import shown, unit_of
from sley_estimate.search.compare import side_by_side
from sley_estimate.search.find import ExactEstimate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sley_core.plan.plan import Plan
    from sley_estimate.search.find import Final, SearchFound
    from sley_estimate.search.layouts import Candidate


def lines(found: SearchFound, skipped: Sequence[str], limit: int | None, notes: Sequence[str]) -> Iterator[str]:
    """Yields the lines that are printed for a search. skipped: plugins that could not be loaded. limit: bytes of a device.
    notes: on the machine.
    """
    ranking = found.ranking
    too_large = "" if limit is None else f"; {ranking.too_large:,} exceed {shown(limit)}"
    steps = f": the best {found.num_exact:,} by a formula took their own steps" if found.num_exact else ""
    yield f"{ranking.num_layouts:,} layouts considered{steps}{too_large}"
    if found.not_begun:
        yield f"  {found.not_begun:,} more did not, since the time for it was over: a larger `--budget` takes them too"
    yield from (f"  {count:,} left out: {reason}" for reason, count in ranking.refused.most_common())
    yield from (f"  left out: {name}" for name in skipped)
    if found.dropped:
        yield f"  {found.dropped:,} that seemed to fit do not, as `estimate` says"
    if not found.fastest:
        yield _none(found, limit)
        return
    how = "verified by estimate" if found.num_exact else "rough"
    yield f"fastest ({how})"
    yield from map(_row, found.fastest)
    yield from _sources(found)
    yield from (f"  {note}" for note in notes)
    if found.front:
        yield f"less memory for more time ({how})"
        yield from map(_row, found.front)


def _sources(found: SearchFound) -> Iterator[str]:
    """Yields where the seconds of the layers come from, if that differs between the layouts shown."""
    sources = {source for one in found.fastest if isinstance(one.takes, ExactEstimate) for source in one.takes.sources}
    if "counted" in sources and len(sources) > 1:
        yield "  Some layers' seconds were measured on the machine, others are computed from their operators alone: they may be"
        yield "  far apart. `calibrate --plan` measures a plan's layers."
    elif len(sources) > 1:
        yield "  Some layers' seconds were measured on the machine, others are computed in proportion to these, for another"
        yield "  policy or size of micro-batches."


def compared(own: ExactEstimate, best: ExactEstimate) -> Iterator[str]:
    """Yields the parts of two estimates, side by side. own: of the plan as it is."""
    yield f"{'':34}{'as it is':>14}{'fastest':>14}{'difference':>14}"
    yield _compared("a step, in seconds", own.seconds, best.seconds)
    for part in side_by_side(own.parts_of_seconds, best.parts_of_seconds):
        yield _compared(f"  {part.name}", part.one, part.other)
    unit, size = unit_of(max(own.num_bytes, best.num_bytes))
    yield _compared(f"most bytes of a rank, in {unit}", own.num_bytes / size, best.num_bytes / size)
    for part in side_by_side(own.parts_of_bytes, best.parts_of_bytes):
        yield _compared(f"  {part.name.replace('_', ' ')}", part.one / size, part.other / size)


def written(plan: Plan, world: int, best: Final) -> str:
    """Returns the plan file of a layout of `plan`, with a comment on every table that the search filled."""
    takes, made = best.takes, best.layout.plan(plan, world)
    how = "verified by estimate" if isinstance(takes, ExactEstimate) else "rough"
    bytes_shown = shown(int(takes.num_bytes))
    head = f"# {world} ranks: {takes.seconds:.4g} s per step, {bytes_shown} on the fullest rank, {how}\n"
    why = _comments(best.layout)
    return head + "\n".join(_commented(text, why) for text in sections(made.tables))


def _comments(layout: Candidate) -> dict[str, str]:
    """Returns a comment for each header of a table that a search fills."""
    sizes, shape = layout.shape.sizes, layout.shape
    found = {
        "[parallel]": f"search: pp = {sizes.pp}, sp = {sizes.sp}, wp = {sizes.wp}; dp follows",
        "[batch]": f"search: micro_size = {sizes.micro_size}",
        "[activations]": f"search: {shape.activations}",
    }
    for header, choice in {
        "[pipeline]": layout.schedule,
        "[weights]": shape.weights,
        "[sequence]": shape.attention,
        "[[gradient_handlers]]": layout.reducer,
        "[[offload]]": shape.offload,
    }.items():
        if choice is not None:
            found[header] = f"search: {choice}"
    return found


def _commented(text: str, why: dict[str, str]) -> str:
    """Returns a section of a plan with its comment above; of several tables with one header only the first gets it."""
    comment = why.pop(text.split("\n", 1)[0], None)
    return f"# {comment}\n{text}" if comment else text


def _compared(name: str, one: float, other: float) -> str:
    return f"{name:34}{one:14.4g}{other:14.4g}{other - one:+14.4g}"


def _row(final: Final) -> str:
    return f"  {final.takes.seconds:10.4g} s  {shown(int(final.takes.num_bytes)):>12}  {final.layout}"


def _none(found: SearchFound, limit: int | None) -> str:
    """Returns the sentence for a search without a result."""
    if found.smallest is None or limit is None:
        ranking = found.ranking
        hints = (ranking.hints.get(reason) for reason, _ in ranking.refused.most_common())
        hint = next((f" (hint: {hint})" for hint in hints if hint), "")
        return f"no layout of this plan is left in this world, for the reasons above{hint}"
    need = shown(int(found.smallest.takes.num_bytes))
    return f"nothing fits into {shown(limit)}: the smallest layout found needs {need} or more: {found.smallest.layout}"
