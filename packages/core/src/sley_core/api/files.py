"""Atomic file writes, readers of weight files, and models of transformers. Imports torch only when needed."""

from sley_core.files import replace_atomically as replace_atomically
from sley_core.files import sync_names as sync_names
from sley_core.hugging_face import IDS as IDS
from sley_core.hugging_face import HuggingFaceModel as HuggingFaceModel
from sley_core.hugging_face import config_folder as config_folder
from sley_core.hugging_face import describe_model as describe_model
from sley_core.hugging_face import open_weights as open_weights
from sley_core.hugging_face import run_of as run_of
from sley_core.hugging_face import start_folder as start_folder
from sley_core.weight_files.read import FLOATS as FLOATS
from sley_core.weight_files.read import RANDOM_SETTINGS as RANDOM_SETTINGS
from sley_core.weight_files.read import TensorKind as TensorKind
from sley_core.weight_files.read import TensorReader as TensorReader
from sley_core.weight_files.read import deterministic_tokenizer_json as deterministic_tokenizer_json
