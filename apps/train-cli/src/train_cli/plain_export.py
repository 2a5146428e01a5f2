"""A run's weights as safetensors files, under the names that the model's own `load_state_dict` takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import RunError
from sley_core.records import ModelRecord
from sley_core.weight_files.write import write_tensors
from train_cli.own_names import ModuleNames, own_names

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.weight_files.read import Tensors


def export_safetensors(plan: Plan, source: Tensors, out: Path, max_file_bytes: int) -> tuple[list[str], ModuleNames]:
    """Writes the weights in `source` into the new folder `out`; returns its files, and how names were found.

    A tied weight stands under each of its names, as in a state. Raises RunError "weights-mismatch" if the factory makes another
    model now.
    """
    record = plan.model.record
    if isinstance(record, ModelRecord) and record.names_are_own:
        found = ModuleNames({name: [name] for name in source.names}, "", [])
    else:
        found = own_names(plan)
        if odd := sorted(found.names.keys() ^ set(source.names)):
            which = "the run's weights have" if odd[0] in source.names else "the model now has"
            message = f"the factory does not make the run's model any more: only {which} {odd[0]!r}"
            raise RunError("weights-mismatch", message, hint="restore the code and the files that the run had")
    pairs = [(ours, theirs) for ours in source.names for theirs in found.names[ours]]
    return write_tensors(out, source, pairs, max_file_bytes), found
