"""A row of the league: a silent error of the field as a small plan, and what it is compared with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed
from sley_testing.verify.findings import Kind, Limits, RankFindings, as_number, differences, report_lines, worst

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


LIMIT = 1e-6  # the relative error of a row in fp32, of losses, norms, gradients and weights alike, in every step


@dataclass(frozen=True)
class LeagueRow:
    """Describes one silent error. The row holds if no number of its layout is further than `limit` from each of its references.

    elsewhere: what goes wrong in other programs, without an error. seen: public threads about it. tables: of the plan.
    layouts: what each layout changes in them, as `changed` takes it: from the second on, each resumes from the checkpoint of
    the one before. alone: what the one-process reference changes beyond having no layout. steps: of each layout. plain: whether
    a plain loop is a reference too. moves: whether all that a run can move leaves the device between two steps.
    """

    name: str
    elsewhere: str
    seen: tuple[str, ...]
    tables: Tables
    layouts: tuple[Tables, ...]
    alone: Tables = field(default_factory=dict)
    steps: int = 3
    limit: float = LIMIT
    plain: bool = True
    moves: bool = False

    @property
    def num_steps(self) -> int:
        """The steps of all layouts together."""
        return self.steps * len(self.layouts)

    @property
    def num_ranks(self) -> int:
        """The ranks of every layout; a row whose layouts differ in it is refused."""
        sizes = {plan.world() for plan in self.plans()}
        assert len(sizes) == 1, f"{self.name}: layouts of {sizes} ranks"
        return sizes.pop()

    def plans(self) -> list[Plan]:
        """Returns the plan of each layout. Raises SleyError for what the plan's checks find, such as a missing plugin."""
        return [self._plan(layout) for layout in self.layouts]

    def plan_alone(self) -> Plan:
        """Returns the plan of one process that computes the same: without what makes a layout."""
        no_layout = {"parallel": {"dp": 1}, "gradient_handlers": []}
        none = dict.fromkeys(("pipeline", "weights", "sequence", "activations", "offload"))
        return self._plan({**self.layouts[0], **no_layout, **none, **self.alone})

    @property
    def layout(self) -> str:
        """The layouts in words: axes, then the records that make them; an arrow where a run goes on in another one."""
        words = [_in_words(changed(self.tables, **layout)) for layout in self.layouts]
        if len(words) > 3 and words == words[:2] * (len(words) // 2):
            return f"{words[0]} ⇄ {words[1]}, {len(words) - 1} times"
        return " → ".join(words)

    def _plan(self, changes: Tables) -> Plan:
        tables = changed(self.tables, **changes)
        return plan_from_dict(changed(tables, run__steps=self.num_steps, run__name=self.name))


def _in_words(tables: Tables) -> str:
    """Returns `dp 2 x wp 2, pp.one_f_one_b, dp.bucketed`; of one rank, how many micro-batches it has."""
    parallel, batch = tables.get("parallel", {}), tables["batch"]
    sizes = [f"{axis} {parallel[axis]}" for axis in ("dp", "sp", "wp", "pp") if parallel.get(axis, 1) > 1]
    axes = " x ".join(sizes) or f"{batch['global_size'] // batch['micro_size']} micro-batches"
    single = [tables[key] for key in ("pipeline", "activations") if key in tables]
    return ", ".join(
        [axes, *(one["use"] for one in (*single, *tables.get("gradient_handlers", []), *tables.get("offload", [])))]
    )


_SMALL: Tables = {
    "run": {"name": "league", "steps": 3, "device": "cpu", "seed": 5},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"factory": "sley_testing.league.parts:DrawnSamples", "options": {}, "shuffle": False},
    "batch": {"global_size": 8, "micro_size": 1},
    # With the default `eps` of 1e-8 an element whose gradient is all rounding makes a step of full size, in any direction.
    "optimizer": {"use": "core.adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5, "eps": 1e-5},
    "limits": {"start_timeout_s": 60.0, "collective_timeout_s": 60.0},
}

BUCKETS = {"use": "dp.bucketed", "bucket_mb": 0.002}  # a reducer with several buckets, though the model is tiny
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.002}  # the same of a sharded optimizer
TIES = {"use": "pp.shared_modules"}  # what sums the gradients of weights that stages share


def small(**changes: Any) -> Tables:
    """Returns the tables of a Llama of two blocks that takes steps of eight samples in fp32, with `changes` as in `changed`."""
    return changed(_SMALL, **changes)


def samples(**options: Any) -> Tables:
    """Returns the table `[data]` of `DrawnSamples` with these options, in the order of their numbers."""
    return changed(_SMALL, data__options=options)["data"]  # type: ignore[no-any-return]  # a table


def adapted(**options: Any) -> Tables:
    """Returns the tables of a frozen model of which low-rank adapters are trained."""
    return small(model={"factory": "sley_testing.league.parts:layers", "options": options}, optimizer__lr=1e-2)


def layout(handlers: Sequence[Tables] = (), *, axes: dict[str, int], **records: str | Tables) -> Tables:
    """Returns what a layout changes: the sizes of its axes, handlers, and a record of each other kind, or its table."""
    tables = {key: {"use": one} if isinstance(one, str) else one for key, one in records.items()}
    return {"parallel": axes} | ({"gradient_handlers": list(handlers)} if handlers else {}) | tables


ISP, ONE_F_ONE_B = "isp.communicator", "pp.one_f_one_b"
_PACKED = samples(documents=[[5, 11], [16], [1, 9, 6], [2, 2, 12], [7, 1, 8], [15, 1]])
_DEEP = small(model__num_layers=4)
_TIED = small(model__tie_embeddings=True)
_TIGHT = small(model__tie_embeddings=True, optimizer__clip_norm=0.1)
_DP = layout([SHARDED], axes={"dp": 2})
_WP = layout(axes={"dp": 2, "wp": 2}, weights=ISP)
_PP = layout(axes={"pp": 2, "dp": 1}, pipeline=ONE_F_ONE_B)
_LIMIT = 2.0**-7
"""What the design promises for bf16: masters that differ in their last bits may be rounded to neighbouring weights."""
_SLOW = small(precision={"compute": "bf16"}, optimizer__lr=3e-5)
"""A step is less than half of what bf16 can tell apart, so only masters keep it."""

ROWS: tuple[LeagueRow, ...] = (
    # A sum over labels is divided by the number of all labels, and nowhere by that of a part.
    LeagueRow(
        name="accumulation",
        elsewhere="each micro-batch is divided by its own number of labels, so labels in short ones have more weight",
        seen=("transformers PR #34191", "transformers #35203", "torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=({"parallel": {"dp": 1}},),
        alone={"batch__micro_size": 8},
    ),
    LeagueRow(
        name="uneven-ranks",
        elsewhere="gradients are averaged over ranks, so labels on a rank with few labels have more weight",
        seen=("torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="masked-ranks",
        elsewhere="a rank whose labels are all ignored divides by zero, or takes part in fewer collectives than the others",
        seen=("OLMo-core PR #657", "OLMo-core PR #452", "OpenRLHF PR #583"),
        tables=small(data=samples(labels=[16, 5, 9, 2, 0, 0, 0, 0]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="held-out",
        elsewhere="the held-out loss is a mean of the means of batches or ranks, so it depends on their sizes",
        seen=("torchtitan PR #4167", "prime-rl PR #1850", "transformers #39241"),
        tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), evaluation={"every": 1, "steps": 2}),
        layouts=({"parallel": {"dp": 2}},),
        alone={"batch__micro_size": 4},
    ),
    # Several ranks share a vocabulary: each has the scores of a slice, for the tokens of all.
    LeagueRow(
        name="vocabulary-wp",
        elsewhere="the loss over a sharded vocabulary includes ignored labels, or only the tokens of its own rank",
        seen=("InternEvo PR #316",),
        tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=(layout(axes={"dp": 2, "wp": 2}, weights={"use": ISP, "head": "vocabulary", "embedding": "hidden"}),),
    ),
    # Attention does not cross the bounds of documents, and covers all of a sequence that several ranks share.
    LeagueRow(
        name="packed-dp",
        elsewhere="attention crosses documents within a sample, or samples of a batch",
        seen=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="packed-sp",
        elsewhere="document boundaries are lost if ranks split a sequence (a loss of 5.81 instead of 3.17)",
        seen=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2),
        layouts=(layout(axes={"sp": 2, "dp": 1}, sequence="isp.all_to_all"),),
    ),
    LeagueRow(
        name="shared-heads-sp",
        elsewhere="gradients of keys and values that several ranks use are not summed (a loss of 3.74 instead of 2.64)",
        seen=("bigcode/Megatron-LM PR #37", "Megatron-LM #1464"),
        tables=small(model__kv_heads=1, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=(layout(axes={"sp": 2, "dp": 2}, sequence="isp.all_to_all"),),
    ),
    # A table that embeds and predicts is one parameter, however many ranks have it.
    LeagueRow(
        name="tied-stages",
        elsewhere="each stage trains its own copy of a tied table, with only part of the gradient",
        seen=("torchtitan #1524", "Megatron-LM #844", "Megatron-LM #1548", "pytorch #51931"),
        tables=_TIED,
        layouts=(layout([TIES], axes={"pp": 2, "dp": 1}, pipeline=ONE_F_ONE_B),),
    ),
    LeagueRow(
        name="sharded-ties",
        elsewhere="with a sharded optimizer, copies of a tied table are summed after the update, or over the wrong group",
        seen=("Megatron-LM #844", "Megatron-LM #4641"),
        tables=_TIED,
        layouts=(layout([SHARDED, TIES], axes={"pp": 2, "dp": 2}, pipeline=ONE_F_ONE_B),),
    ),
    # Where a backward has two halves, sums over ranks wait for the half that computes gradients of weights.
    LeagueRow(
        name="split-backward-dp",
        elsewhere="replicas sum gradients before the second half of a split backward has added to them",
        seen=("pytorch #144530",),
        tables=_DEEP,
        layouts=(layout([BUCKETS, TIES], axes={"pp": 2, "dp": 2}, pipeline="pp.zero_bubble_h1"),),
    ),
    LeagueRow(
        name="split-backward-wp",
        elsewhere="weight shards are freed, and their gradients reduced, before the second half of a split backward",
        seen=("pytorch PR #134052",),
        tables=_DEEP,
        layouts=(layout(axes={"pp": 2, "dp": 2, "wp": 2}, pipeline="pp.zero_bubble_v", weights=ISP),),
    ),
    # In the norm of a gradient that no rank has whole, each element counts once.
    LeagueRow(
        name="clip-pp",
        elsewhere="each stage clips by its own norm, or the norm includes a tied table once per stage",
        seen=("torchtitan #596", "torchtitan #649", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=(_PP,),
    ),
    LeagueRow(
        name="clip-wp-pp",
        elsewhere="the norm does not distinguish sharded weights from weights that every rank has",
        seen=("torchtitan #596", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=(layout(axes={"pp": 2, "dp": 2, "wp": 2}, pipeline=ONE_F_ONE_B, weights=ISP),),
    ),
    # Low-rank adapters train few weights of a frozen model (Hu et al. 2021, LoRA).
    LeagueRow(
        name="adapters-wp",
        elsewhere="most sharded adapters get no gradient, or each rank trains a separate factor",
        seen=("torchforge #592", "mcore-bridge PR #173", "Megatron-Bridge #5634"),
        tables=adapted(),
        layouts=(_WP,),
    ),
    LeagueRow(
        name="adapters-pp",
        elsewhere="a stage without trained parameters sends no gradient to the adapters before it, or the run fails there",
        seen=("ColossalAI #3889",),
        tables=adapted(trained=[0]),
        layouts=(layout(axes={"pp": 2, "dp": 1}, pipeline="pp.zero_bubble_h1"),),
    ),
    LeagueRow(
        name="dropout-pp",
        elsewhere="stages draw different random numbers than one process, or the recomputation differs from the forward",
        seen=("Megatron-LM PR #6858",),
        tables=adapted(dropout=0.2),
        layouts=(layout(axes={"pp": 2, "dp": 1}, pipeline="pp.interleaved", activations="core.recompute"),),
        plain=False,  # a loop of its own draws numbers of its own
    ),
    # Memory that leaves the device comes back as it left, and nothing is dropped meanwhile.
    LeagueRow(
        name="offload",
        elsewhere="with offload, only the last micro-batch's gradient is kept, or outdated weights are reloaded",
        seen=("DeepSpeed #7981", "DeepSpeed #7967", "DeepSpeed PR #8186"),
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
        moves=True,
    ),
    # A run that continues from a checkpoint in another layout equals one that was never stopped.
    LeagueRow(
        name="resume-wp",
        elsewhere="a resumed run loses the state of some ranks: shards, optimizer states, or the position in their samples",
        seen=("Megatron-Bridge PR #5637", "prime-rl #3332", "ISEEKYAN/Megatron-LM PR #104"),
        tables=_TIED,
        layouts=(_DP, _WP),
        steps=2,
    ),
    LeagueRow(
        name="resume-pp",
        elsewhere="a resumed run recreates a tied head from the table, or loses its optimizer states",
        seen=("Automodel #2571",),
        tables=_TIED,
        layouts=(_DP, _PP),
        steps=2,
    ),
    LeagueRow(
        name="resume-again",
        elsewhere="when a run is resumed a second time, its samples start again, or its random numbers are off by one draw",
        seen=("torchtitan #3908", "datasets #8308", "Megatron-Bridge #5257"),
        tables=adapted(dropout=0.2),
        layouts=(_PP, _WP, _PP),
        steps=2,
        plain=False,  # a loop of its own draws numbers of its own
    ),
    # Formats narrower than fp32.
    LeagueRow(
        name="bf16-masters",
        elsewhere="master weights, moments or gradient sums are stored in bf16, which rounds small updates away",
        seen=("apex #1728", "speculators PR #765", "Automodel PR #3444"),
        tables=_SLOW,
        layouts=(_DP,),
        steps=16,
        limit=_LIMIT,
        plain=False,  # of one format alone
    ),
    LeagueRow(
        name="resume-masters",
        elsewhere="a resumed run recreates its master weights from bf16 weights",
        seen=("OpenTau #185",),
        tables=_SLOW,
        layouts=(_DP, _PP) * 8,
        steps=1,  # between two rounds to bf16, which would undo it
        limit=_LIMIT,
        plain=False,
    ),
)


SHOWN: tuple[Kind, ...] = ("loss", "gradient norm", "gradient", "weight")
"""The kinds that the table has a column for. First values must be equal bit for bit, and are told only where they are not; a
held-out loss counts as a loss."""


@dataclass(frozen=True)
class Result:
    """Holds the largest relative errors of a row, over all ranks, steps and parameters.

    errors: beside one process, by kind. plain: the largest of any kind beside the plain loop; None where the row has none.
    differs: where it does not hold, the lines that say what differs first. failed: why it could not be compared.
    """

    row: LeagueRow
    errors: dict[Kind, float] = field(default_factory=dict)
    plain: float | None = None
    differs: tuple[str, ...] = ()
    failed: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing is beyond the row's limit."""
        return not self.differs and not self.failed


def judge_row(row: LeagueRow, alone: Sequence[RankFindings], plain: Sequence[RankFindings] | None) -> Result:
    """Returns the result of a row. alone, plain: findings beside one process, and beside the plain loop if it has one."""
    limits = Limits(row.limit, row.limit)
    found = {one.kind: one.error for one in worst(alone, limits)}
    found["loss"] = max(found["loss"], found.get("held-out loss", 0.0))
    errors = {kind: found[kind] for kind in SHOWN if kind in found}
    beside_plain = None if plain is None else max(one.error for one in worst(plain, limits))
    differs: tuple[str, ...] = ()
    for what, findings in (("the plain loop", plain or ()), ("one process", alone)):  # what differs from one process wins
        if differences(findings, limits):
            lines = list(report_lines(findings, limits, row.num_steps))
            differs = (f"beside {what} it {lines[0]}", *lines[1 : lines.index("")])
    return Result(row, errors, beside_plain, differs)


def in_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields a table of the largest relative errors, two lines a row: the numbers, and what goes wrong elsewhere. A row that
    does not hold is followed by what differs first, and named again at the end.
    """
    heads = (*(kind.removeprefix("gradient ") for kind in SHOWN), "plain loop", "allowed")
    yield f"{'largest error':<18}" + "".join(f"{head:>12}" for head in heads)
    for one in results:
        numbers = (*(one.errors.get(kind) for kind in SHOWN), one.plain, one.row.limit)
        cells = "".join(f"{'' if number is None else f'{number:.2g}':>12}" for number in numbers)
        yield f"{one.row.name:<18}{cells}  {'holds' if one.holds else 'DOES NOT HOLD'}"
        yield f"  {one.row.layout}"
        seen = f" ({', '.join(one.row.seen)})" if one.row.seen else ""
        yield f"  elsewhere: {one.row.elsewhere}{seen}"
        yield from (f"  {line}" for line in one.differs)
        if one.failed:
            yield f"  could not be compared: {one.failed}"
    yield ""
    wrong = [one.row.name for one in results if not one.holds]
    if wrong:
        yield f"{len(wrong)} of {len(results)} rows do not hold: {', '.join(wrong)}"
    else:
        yield f"all {len(results)} rows hold" if len(results) > 1 else f"{results[0].row.name} holds"


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Returns the results as JSON; an error of null is no finite number."""
    return {"holds": all(one.holds for one in results), "rows": [_row(one) for one in results]}


def _row(one: Result) -> dict[str, Any]:
    row = one.row
    return {
        "name": row.name,
        "elsewhere": row.elsewhere,
        "seen": list(row.seen),
        "layout": row.layout,
        "ranks": row.num_ranks,
        "steps": row.num_steps,
        "allowed": row.limit,
        "errors": {kind: as_number(error) for kind, error in one.errors.items()},
        "has_plain_loop": row.plain,
        "plain_loop": None if one.plain is None else as_number(one.plain),
        "holds": one.holds,
        "differs": list(one.differs),
        "failed": one.failed or None,
    }
