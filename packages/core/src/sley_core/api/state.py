"""The state of a run and its attempts, for checkpointers."""

from sley_core.attempt import Attempt as Attempt
from sley_core.attempt import Lineage as Lineage
from sley_core.run_state.pieces import WEIGHTS as WEIGHTS
from sley_core.run_state.pieces import CheckpointReader as CheckpointReader
from sley_core.run_state.pieces import Rectangle as Rectangle
from sley_core.run_state.pieces import SavedRun as SavedRun
from sley_core.run_state.pieces import TensorPiece as TensorPiece
from sley_core.run_state.pieces import WholeTensors as WholeTensors
from sley_core.run_state.state import TrainingState as TrainingState
from sley_core.weight_files.write import BY_NAME as BY_NAME
from sley_core.weight_files.write import DTYPES as DTYPES
from sley_core.weight_files.write import Spec as Spec
from sley_core.weight_files.write import build_header as build_header
from sley_core.weight_files.write import bytes_of as bytes_of
from sley_core.words import shorten_names as shorten_names
