"""Says what estimates take for granted that a machine file does not tell, in words for who reads them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sley_estimate.machine.tables import LinkTable, MachineFile

KINDS = ("send", "sum", "gather", "reduce", "swap")

OVERLAP = (
    "the machine file says nothing of `overlap`, so exchanges count as if they ran wholly beside computing: "
    "measure again with `calibrate --ranks`"
)


def notes_on(machine: MachineFile, size: int) -> list[str]:
    """Returns lines for the user: one where ranks of a host with CPUs exchange tensors and the file does not say how much of
    that runs beside computing; else none.
    """
    link = machine.links.same_host
    together = min(size, machine.links.ranks_per_host) > 1
    # On other devices nothing is measured: what carries bytes there takes no time of what computes.
    if machine.device.kind == "cpu" and together and link is not None and not _tells_overlap(link):
        return [OVERLAP]
    return []


def _tells_overlap(link: LinkTable) -> bool:
    """Returns whether every kind of exchange over `link` has an `overlap` that was written, not taken by default."""
    own = [way for kind in KINDS if (way := getattr(link, kind)) is not None]
    used = own if len(own) == len(KINDS) else [link, *own]
    return all("overlap" in way.model_fields_set for way in used)
