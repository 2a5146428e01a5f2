"""The table of `narrow.reducer` in a plan."""

from pydantic import NonNegativeInt

from sley_core.api.plan import Table


class NarrowConfig(Table):
    """`narrow.reducer`: sends gradients as bfloat16."""

    min_numel: NonNegativeInt = 1024
    """Smaller gradients are sent unchanged: norms and biases are sensitive and small."""
