"""The rows of the league: each would reproduce a silent error of other programs in a small plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plans import Tables, changed

LIMIT = 1e-6  # the allowed relative error of losses, norms, gradients and weights in fp32, in every step


@dataclass(frozen=True)
class LeagueRow:
    """Describes one silent error. The row holds if the relative error to each reference is at most `limit`.

    silent_error: the error in other programs. issues: public threads about it. tables: the tables of the plan. layouts: the
    changes of each layout, in the format of `changed`. Each layout after the first resumes from the checkpoint of the previous
    one. reference_changes: further changes of the one-process reference. steps_per_layout: the number of steps in each layout.
    has_plain_loop: whether a plain loop is a second reference. offloads: whether the run offloads all it can between steps.
    """

    name: str
    silent_error: str
    issues: tuple[str, ...]
    tables: Tables
    layouts: tuple[Tables, ...]
    reference_changes: Tables = field(default_factory=dict)
    steps_per_layout: int = 3
    limit: float = LIMIT
    has_plain_loop: bool = True
    offloads: bool = False

    @property
    def num_steps(self) -> int:
        """The number of steps in all layouts."""
        return self.steps_per_layout * len(self.layouts)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, which must be equal in all layouts."""
        sizes = {plan.world_size() for plan in self.plans()}
        assert len(sizes) == 1, f"{self.name}: layouts of {sizes} ranks"
        return sizes.pop()

    def plans(self) -> list[Plan]:
        """Returns the plan of each layout."""
        return [self._plan(layout) for layout in self.layouts]

    def one_process_plan(self) -> Plan:
        """Returns the plan of the one-process reference, without the tables of a layout."""
        no_layout = {"parallel": {"dp": 1}, "gradient_handlers": []}
        removed_tables = dict.fromkeys(("pipeline", "weights", "sequence", "activations", "offload"))
        return self._plan({**self.layouts[0], **no_layout, **removed_tables, **self.reference_changes})

    @property
    def layout(self) -> str:
        """The description of the layouts, joined by arrows: axes and records."""
        descriptions = [_describe_layout(changed(self.tables, **layout)) for layout in self.layouts]
        if len(descriptions) > 3 and descriptions == descriptions[:2] * (len(descriptions) // 2):
            return f"{descriptions[0]} ⇄ {descriptions[1]}, {len(descriptions) - 1} times"
        return " → ".join(descriptions)

    def _plan(self, changes: Tables) -> Plan:
        tables = changed(self.tables, **changes)
        return plan_from_dict(changed(tables, run__steps=self.num_steps, run__name=self.name))


def _describe_layout(tables: Tables) -> str:
    """Returns text like "dp 2 x wp 2, pp.one_f_one_b, dp.bucketed", or the number of microbatches of a single rank."""
    parallel, batch = tables.get("parallel", {}), tables["batch"]
    sizes = [f"{axis} {parallel[axis]}" for axis in ("dp", "sp", "wp", "pp") if parallel.get(axis, 1) > 1]
    axes = " x ".join(sizes) or f"{batch['global_size'] // batch['micro_size']} microbatches"
    records = [tables[key] for key in ("pipeline", "activations") if key in tables]
    records += [*tables.get("gradient_handlers", []), *tables.get("offload", [])]
    return ", ".join([axes, *(record["use"] for record in records)])


_SMALL: Tables = {
    "run": {"name": "league", "steps": 3, "device": "cpu", "seed": 5},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"factory": "league_model:RandomSamples", "options": {}, "shuffle": False},
    "batch": {"global_size": 8, "micro_size": 1},
    # With the default `eps` of 1e-8, an element whose gradient is only rounding noise takes a full-size step.
    "optimizer": {"use": "core.adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5, "eps": 1e-5},
    "limits": {"start_timeout_s": 60.0, "collective_timeout_s": 60.0},
}

# Buckets are small, so that the small model has several of them.
BUCKETS = {"use": "dp.bucketed", "bucket_mb": 0.002}
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.002}
TIES = {"use": "pp.shared_modules"}  # sums the gradients of weights that stages share


def small(**changes: Any) -> Tables:
    """Returns the tables of a two-block Llama that trains in fp32 on eight samples per step, with `changes` as in `changed`."""
    return changed(_SMALL, **changes)


def samples(**options: Any) -> Tables:
    """Returns the `[data]` table of `RandomSamples` with these options, in the order of their indices."""
    return changed(_SMALL, data__options=options)["data"]  # type: ignore[no-any-return]  # a table


def adapted(**options: Any) -> Tables:
    """Returns the tables of a frozen model with trained low-rank adapters."""
    return small(model={"factory": "league_model:layers", "options": options}, optimizer__lr=1e-2)


def layout(handlers: Sequence[Tables] = (), *, axes: dict[str, int], **records: str | Tables) -> Tables:
    """Returns the changes of a layout: its axis sizes, its handlers, and other records by name or table."""
    tables = {key: {"use": record} if isinstance(record, str) else record for key, record in records.items()}
    return {"parallel": axes} | ({"gradient_handlers": list(handlers)} if handlers else {}) | tables


ISP, ONE_F_ONE_B = "isp.communicator", "pp.one_f_one_b"
_PACKED = samples(document_lengths=[[5, 11], [16], [1, 9, 6], [2, 2, 12], [7, 1, 8], [15, 1]])
_DEEP = small(model__num_layers=4)
_TIED = small(model__tie_embeddings=True)
_TIGHT = small(model__tie_embeddings=True, optimizer__clip_norm=0.1)
_DP = layout([SHARDED], axes={"dp": 2})
_WP = layout(axes={"dp": 2, "wp": 2}, weights=ISP)
_PP = layout(axes={"pp": 2, "dp": 1}, pipeline=ONE_F_ONE_B)
_LIMIT = 2.0**-7
"""The limit in bf16: master weights that differ in their last bits may be rounded to neighbouring weights."""
_SLOW = small(precision={"compute": "bf16"}, optimizer__lr=3e-5)
"""A step is smaller than half the spacing of bf16 numbers, so that only master weights keep it."""

ROWS: tuple[LeagueRow, ...] = (
    # A loss sum is divided by the number of all labels, never by the number of labels on a rank or in a microbatch.
    LeagueRow(
        name="accumulation",
        silent_error="each microbatch is divided by its own number of labels, so labels in short ones have more weight",
        issues=("transformers PR #34191", "transformers #35203", "torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(num_labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=({"parallel": {"dp": 1}},),
        reference_changes={"batch__micro_size": 8},
    ),
    LeagueRow(
        name="uneven-ranks",
        silent_error="gradients are averaged over ranks, so labels on a rank with few labels have more weight",
        issues=("torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(num_labels=[16, 15, 13, 16, 2, 1, 3, 2]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="masked-ranks",
        silent_error="a rank whose labels are all ignored divides by zero, or takes part in fewer collectives than the others",
        issues=("OLMo-core PR #657", "OLMo-core PR #452", "OpenRLHF PR #583"),
        tables=small(data=samples(num_labels=[16, 5, 9, 2, 0, 0, 0, 0]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="held-out",
        silent_error="the held-out loss is a mean of the means of batches or ranks, so it depends on their sizes",
        issues=("torchtitan PR #4167", "prime-rl PR #1850", "transformers #39241"),
        tables=small(data=samples(num_labels=[16, 15, 13, 16, 2, 1, 3, 2]), evaluation={"every": 1, "steps": 2}),
        layouts=({"parallel": {"dp": 2}},),
        reference_changes={"batch__micro_size": 4},
    ),
    # Ranks split the vocabulary: each has the scores of a slice, for the tokens of all ranks.
    LeagueRow(
        name="vocabulary-wp",
        silent_error="the loss over a sharded vocabulary includes ignored labels, or only the tokens of its own rank",
        issues=("InternEvo PR #316",),
        tables=small(data=samples(num_labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=(layout(axes={"dp": 2, "wp": 2}, weights={"use": ISP, "head": "vocabulary", "embedding": "hidden"}),),
    ),
    # Attention does not cross document bounds, and covers the full sequence if ranks split it.
    LeagueRow(
        name="packed-dp",
        silent_error="attention crosses documents within a sample, or samples of a batch",
        issues=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="packed-sp",
        silent_error="document boundaries are lost if ranks split a sequence (a loss of 5.81 instead of 3.17)",
        issues=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2),
        layouts=(layout(axes={"sp": 2, "dp": 1}, sequence="isp.all_to_all"),),
    ),
    LeagueRow(
        name="shared-heads-sp",
        silent_error="gradients of keys and values that several ranks use are not summed (a loss of 3.74 instead of 2.64)",
        issues=("bigcode/Megatron-LM PR #37", "Megatron-LM #1464"),
        tables=small(model__kv_heads=1, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=(layout(axes={"sp": 2, "dp": 2}, sequence="isp.all_to_all"),),
    ),
    # A table that embeds and predicts is one parameter, even if several ranks have it.
    LeagueRow(
        name="tied-stages",
        silent_error="each stage trains its own copy of a tied table, with only part of the gradient",
        issues=("torchtitan #1524", "Megatron-LM #844", "Megatron-LM #1548", "pytorch #51931"),
        tables=_TIED,
        layouts=(layout([TIES], axes={"pp": 2, "dp": 1}, pipeline=ONE_F_ONE_B),),
    ),
    LeagueRow(
        name="sharded-ties",
        silent_error="with a sharded optimizer, copies of a tied table are summed after the update, or over the wrong group",
        issues=("Megatron-LM #844", "Megatron-LM #4641"),
        tables=_TIED,
        layouts=(layout([SHARDED, TIES], axes={"pp": 2, "dp": 2}, pipeline=ONE_F_ONE_B),),
    ),
    # If the backward has two halves, reductions wait for the half that computes weight gradients.
    LeagueRow(
        name="split-backward-dp",
        silent_error="replicas sum gradients before the second half of a split backward has added to them",
        issues=("pytorch #144530",),
        tables=_DEEP,
        layouts=(layout([BUCKETS, TIES], axes={"pp": 2, "dp": 2}, pipeline="pp.zero_bubble_h1"),),
    ),
    LeagueRow(
        name="split-backward-wp",
        silent_error="weight shards are freed, and their gradients reduced, before the second half of a split backward",
        issues=("pytorch PR #134052",),
        tables=_DEEP,
        layouts=(layout(axes={"pp": 2, "dp": 2, "wp": 2}, pipeline="pp.zero_bubble_v", weights=ISP),),
    ),
    # The norm of a distributed gradient counts each element once.
    LeagueRow(
        name="clip-pp",
        silent_error="each stage clips by its own norm, or the norm includes a tied table once per stage",
        issues=("torchtitan #596", "torchtitan #649", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=(_PP,),
    ),
    LeagueRow(
        name="clip-wp-pp",
        silent_error="the norm does not distinguish sharded weights from weights that every rank has",
        issues=("torchtitan #596", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=(layout(axes={"pp": 2, "dp": 2, "wp": 2}, pipeline=ONE_F_ONE_B, weights=ISP),),
    ),
    # Low-rank adapters train few weights of a frozen model (Hu et al. 2021, LoRA).
    LeagueRow(
        name="adapters-wp",
        silent_error="most sharded adapters get no gradient, or each rank trains a separate factor",
        issues=("torchforge #592", "mcore-bridge PR #173", "Megatron-Bridge #5634"),
        tables=adapted(),
        layouts=(_WP,),
    ),
    LeagueRow(
        name="adapters-pp",
        silent_error="a stage without trained parameters sends no gradient to the adapters before it, or the run fails there",
        issues=("ColossalAI #3889",),
        tables=adapted(trained=[0]),
        layouts=(layout(axes={"pp": 2, "dp": 1}, pipeline="pp.zero_bubble_h1"),),
    ),
    LeagueRow(
        name="dropout-pp",
        silent_error="stages draw different random numbers than one process, or the recomputation differs from the forward",
        issues=("Megatron-LM PR #6858",),
        tables=adapted(dropout=0.2),
        layouts=(layout(axes={"pp": 2, "dp": 1}, pipeline="pp.interleaved", activations="core.recompute"),),
        has_plain_loop=False,  # a plain loop draws different random numbers
    ),
    # Offloaded memory is reloaded unchanged.
    LeagueRow(
        name="offload",
        silent_error="with offload, only the last microbatch's gradient is kept, or outdated weights are reloaded",
        issues=("DeepSpeed #7981", "DeepSpeed #7967", "DeepSpeed PR #8186"),
        tables=small(gradient_handlers=[BUCKETS]),
        layouts=(
            {
                "parallel": {"dp": 2},
                "offload": [
                    {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002},
                    {"use": "memory.everything", "parts": ["weights", "gradients"]},
                ],
            },
        ),
        offloads=True,
    ),
    # A run that is resumed in another layout equals an uninterrupted run.
    LeagueRow(
        name="resume-wp",
        silent_error="a resumed run loses the state of some ranks: shards, optimizer states, or the position in their samples",
        issues=("Megatron-Bridge PR #5637", "prime-rl #3332", "ISEEKYAN/Megatron-LM PR #104"),
        tables=_TIED,
        layouts=(_DP, _WP),
        steps_per_layout=1,
    ),
    LeagueRow(
        name="resume-pp",
        silent_error="a resumed run recreates a tied head from the table, or loses its optimizer states",
        issues=("Automodel #2571",),
        tables=_TIED,
        layouts=(_DP, _PP),
        steps_per_layout=2,
    ),
    LeagueRow(
        name="resume-again",
        silent_error="when a run is resumed a second time, its samples start again, or its random numbers are off by one draw",
        issues=("torchtitan #3908", "datasets #8308", "Megatron-Bridge #5257"),
        tables=adapted(dropout=0.2),
        layouts=(_PP, _WP, _PP),
        steps_per_layout=2,
        has_plain_loop=False,  # a plain loop draws different random numbers
    ),
    # Formats narrower than fp32.
    LeagueRow(
        name="bf16-masters",
        silent_error="master weights, moments or gradient sums are stored in bf16, which rounds small updates away",
        issues=("apex #1728", "speculators PR #765", "Automodel PR #3444"),
        tables=_SLOW,
        layouts=(_DP,),
        steps_per_layout=16,
        limit=_LIMIT,
        has_plain_loop=False,  # a plain loop has a single dtype
    ),
    LeagueRow(
        name="resume-masters",
        silent_error="a resumed run recreates its master weights from bf16 weights",
        issues=("OpenTau #185",),
        tables=_SLOW,
        layouts=(_DP, _PP) * 8,
        steps_per_layout=1,  # between two rounds to bf16, which would undo it
        limit=_LIMIT,
        has_plain_loop=False,
    ),
)
