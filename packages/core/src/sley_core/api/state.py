"""The state of a run and its attempts, for checkpointers."""

from sley_core.checkpointing import WEIGHTS, CheckpointReader, Rectangle, SavedRun, TensorPiece, TrainingState, WholeTensors
from sley_core.errors import shorten_names
from sley_core.run_folder import Attempt, Lineage
from sley_core.weight_files.write import BY_NAME, DTYPES, Spec, build_header, bytes_of

__all__ = ["BY_NAME", "DTYPES", "WEIGHTS", "Attempt", "CheckpointReader", "Lineage", "Rectangle", "SavedRun", "Spec"]
__all__ += ["TensorPiece", "TrainingState", "WholeTensors", "build_header", "bytes_of", "shorten_names"]
