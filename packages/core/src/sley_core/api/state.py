"""Gives checkpointers what a run keeps, the means to restore it, and the attempts of a run."""

from sley_core.attempt import Attempt, Lineage, shortened
from sley_core.run_state.pieces import WEIGHTS, Rectangle, Saved, SavedRun, TensorPiece, WholeTensors
from sley_core.run_state.state import TrainingState
from sley_core.weight_files.write import BY_NAME, DTYPES, Spec, bytes_of, header_of

__all__ = [
    "BY_NAME",
    "DTYPES",
    "WEIGHTS",
    "Attempt",
    "Lineage",
    "Rectangle",
    "Saved",
    "SavedRun",
    "Spec",
    "TensorPiece",
    "TrainingState",
    "WholeTensors",
    "bytes_of",
    "header_of",
    "shortened",
]
