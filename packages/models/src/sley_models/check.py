"""Checks, without torch, that the files of `[model] weights` exist and fit the model that the plan describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.errors import KeyPath, RunError
from sley_core.records import Problem
from sley_models.config import LlamaConfig

if TYPE_CHECKING:
    from sley_core.api.files import WeightFiles
    from sley_core.api.plan import Plan

PATH: KeyPath = ("model", "weights")

_IGNORED = ".rotary_emb.inv_freq"
"""Suffix of a buffer that old files have for each block; transformers computes it instead, too."""

_SHOWN = 4


def check_model(plan: Plan) -> Iterable[Problem]:
    """Yields a problem if `[model] weights` has no files, or files of another model. Reads headers, no values."""
    config = plan.model.config
    if not isinstance(config, LlamaConfig) or config.weights is None:
        return
    from sley_core.api.files import WeightFiles  # no other plan needs the library
    from sley_models.hf_config import read_config

    try:
        read_config(config.weights)
        files = WeightFiles(config.weights)
    except ValueError as error:
        yield Problem(PATH, str(error), "the folder of `save_pretrained` has it", "model-weights")
    except RunError as error:
        yield Problem(PATH, error.diagnostics[0].message, error.diagnostics[0].hint, "model-weights")
    else:
        for message in check_files(files, config):
            yield Problem(PATH, message, "`config.json` and the files belong to different models", "model-weights")


def check_files(files: WeightFiles, config: LlamaConfig) -> list[str]:
    """Returns at most one message: which tensors are missing, unknown, of another shape, or of a dtype from which no run can
    start.
    """
    from sley_core.api.files import FLOATS
    from sley_models import hf

    assert config.vocab_size is not None, "`weights` says the size of the vocabulary"
    wanted = hf.shapes(config, config.vocab_size)
    spare = {hf.THEIR_HEAD} if config.tie_embeddings else set()
    wrong = [f"{name!r} is missing" for name in wanted if name not in files.stored]
    for name, found in files.stored.items():
        if name in wanted and found.shape != wanted[name]:
            wrong.append(f"{name!r} is {list(found.shape)} and not {list(wanted[name])}")
        elif name in wanted and found.dtype not in FLOATS:
            wrong.append(f"{name!r} is {found.dtype}, none of {', '.join(FLOATS)}")
        elif name not in wanted and name not in spare and not name.endswith(_IGNORED):
            wrong.append(f"{name!r} is unknown")
    if not wrong:
        return []
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return [f"the files in `{config.weights}` are not the weights of this model: {', '.join(wrong[:_SHOWN])}{more}"]
