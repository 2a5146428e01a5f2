"""The types of samples, of their fields, and of text as token ids. Imports no torch."""

from sley_core.data.dataset import BOUNDARY_FIELDS as BOUNDARY_FIELDS
from sley_core.data.dataset import IGNORE_INDEX as IGNORE_INDEX
from sley_core.data.dataset import SOURCE as SOURCE
from sley_core.data.dataset import TOKEN_FIELDS as TOKEN_FIELDS
from sley_core.data.dataset import DataContext as DataContext
from sley_core.data.dataset import DataInfo as DataInfo
from sley_core.data.dataset import Dataset as Dataset
from sley_core.data.dataset import Field as Field
from sley_core.data.dataset import Order as Order
from sley_core.data.dataset import Sample as Sample
from sley_core.data.dataset import Split as Split
from sley_core.data.dataset import TextIds as TextIds
from sley_core.data.dataset import is_stream as is_stream
