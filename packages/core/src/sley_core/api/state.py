"""Gives checkpointers what a run keeps, the means to restore it, and the attempts of a run."""

from sley_core.attempt import NEVER_ANEW, Attempt, Lineage, shortened
from sley_core.run_state.pieces import Rectangle, TensorPiece, all_of
from sley_core.run_state.saved import Saved, SavedRun, WholeTensors
from sley_core.run_state.state import TrainingState
from sley_core.run_state.tensors import BUFFERS, WEIGHTS
from sley_core.weight_files.write import BY_NAME, DTYPES

__all__ = [
    "BUFFERS",
    "BY_NAME",
    "DTYPES",
    "NEVER_ANEW",
    "WEIGHTS",
    "Attempt",
    "Lineage",
    "Rectangle",
    "Saved",
    "SavedRun",
    "TensorPiece",
    "TrainingState",
    "WholeTensors",
    "all_of",
    "shortened",
]
