"""The rows of the league: plans for the field's silent errors, each in the layout in which others have it. Imports no torch."""

from __future__ import annotations

from typing import Any

from sley_testing.league.row import LeagueRow
from sley_testing.plans import Tables, changed

_SMALL: Tables = {
    "run": {"name": "league", "steps": 3, "device": "cpu", "seed": 5},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24},
    "data": {"factory": "sley_testing.league.parts:DrawnSamples", "options": {}, "shuffle": False},
    "batch": {"global_size": 8, "micro_size": 1},
    # With the default `eps` of 1e-8 an element whose gradient is all rounding makes a step of full size, in any direction.
    "optimizer": {"use": "core.adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5, "eps": 1e-5},
    "limits": {"start_timeout_s": 60.0, "collective_timeout_s": 60.0},
}

BUCKETS = {"use": "dp.bucketed", "bucket_mb": 0.002}
"""A reducer with several buckets, though the model is tiny."""

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.002}
"""The same of a sharded optimizer."""

TIES = {"use": "pp.shared_modules"}
"""What sums the gradients of weights that stages share."""


def small(**changes: Any) -> Tables:
    """Returns the tables of a Llama of two blocks that takes steps of eight samples in fp32, with `changes` as in `changed`."""
    return changed(_SMALL, **changes)


def samples(**options: Any) -> Tables:
    """Returns the table `[data]` of `DrawnSamples` with these options, in the order of their numbers."""
    return changed(_SMALL, data__options=options)["data"]  # type: ignore[no-any-return]  # a table


_PACKED = samples(documents=[[5, 11], [16], [1, 9, 6], [2, 2, 12], [7, 1, 8], [15, 1]])
_DEEP = small(model__num_layers=4)
_TIGHT = small(model__tie_embeddings=True, optimizer__clip_norm=0.1)
_ADAPTED = small(model={"factory": "sley_testing.league.parts:layers"}, optimizer__lr=1e-2)
_DP: dict[str, Any] = {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]}
_WP: dict[str, Any] = {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}
_PP: dict[str, Any] = {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}}
_LIMIT = 2.0**-7
"""What the design promises for bf16: masters that differ in their last bits may be rounded to neighbouring weights."""
_SLOW = small(precision={"compute": "bf16"}, optimizer__lr=3e-5)
"""A step is less than half of what bf16 can tell apart, so only masters keep it."""

ROWS: tuple[LeagueRow, ...] = (
    # A sum over labels is divided by the number of all labels, and nowhere by that of a part.
    LeagueRow(
        name="accumulation",
        elsewhere="each micro-batch is divided by its own labels, so that those of short ones count more",
        seen=("transformers PR #34191", "transformers #35203", "torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=({"parallel": {"dp": 1}},),
        alone={"batch__micro_size": 8},
    ),
    LeagueRow(
        name="uneven-ranks",
        elsewhere="gradients are averaged over ranks, so that those of a rank with few labels count more",
        seen=("torchtune PR #1917", "Lightning PR #21386"),
        tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="masked-ranks",
        elsewhere="a rank on which no label counts divides by zero, or joins fewer sums than the others",
        seen=("OLMo-core PR #657", "OLMo-core PR #452", "OpenRLHF PR #583"),
        tables=small(data=samples(labels=[16, 5, 9, 2, 0, 0, 0, 0]), gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="held-out",
        elsewhere="the held-out loss is a mean of the means of batches or ranks, so that it depends on their sizes",
        seen=("torchtitan PR #4167", "prime-rl PR #1850", "transformers #39241"),
        tables=small(data=samples(labels=[16, 15, 13, 16, 2, 1, 3, 2]), evaluation={"every": 1, "steps": 2}),
        layouts=({"parallel": {"dp": 2}},),
        alone={"batch__micro_size": 4},
    ),
    # Several ranks share a vocabulary: each has the scores of a slice, for the tokens of all.
    LeagueRow(
        name="vocabulary-wp",
        elsewhere="the loss over a vocabulary in slices counts ignored labels, or only the tokens of its own rank",
        seen=("InternEvo PR #316",),
        tables=small(data=samples(labels=[16, 3, 9, 1, 12, 2, 7, 5])),
        layouts=(
            {
                "parallel": {"dp": 2, "wp": 2},
                "weights": {"use": "isp.communicator", "head": "vocabulary", "embedding": "hidden"},
            },
        ),
    ),
    # Attention does not cross the bounds of documents, and covers all of a sequence that several ranks share.
    LeagueRow(
        name="packed-dp",
        elsewhere="documents of one sample see each other, or those of the samples beside it",
        seen=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"dp": 2}},),
    ),
    LeagueRow(
        name="packed-sp",
        elsewhere="bounds of documents are lost where a sequence is on several ranks (a loss of 5.81 in place of 3.17)",
        seen=("axolotl #3608",),
        tables=small(data=_PACKED, batch__micro_size=2),
        layouts=({"parallel": {"sp": 2, "dp": 1}, "sequence": {"use": "isp.all_to_all"}},),
    ),
    LeagueRow(
        name="shared-heads-sp",
        elsewhere="gradients of keys and values that several ranks use are not summed (a loss of 3.74 in place of 2.64)",
        seen=("bigcode/Megatron-LM PR #37", "Megatron-LM #1464"),
        tables=small(model__kv_heads=1, batch__micro_size=2, gradient_handlers=[BUCKETS]),
        layouts=({"parallel": {"sp": 2, "dp": 2}, "sequence": {"use": "isp.all_to_all"}},),
    ),
    # A table that embeds and predicts is one parameter, however many ranks have it.
    LeagueRow(
        name="tied-stages",
        elsewhere="each stage trains its own copy of a tied table, with a part of its gradient",
        seen=("torchtitan #1524", "Megatron-LM #844", "Megatron-LM #1548", "pytorch #51931"),
        tables=small(model__tie_embeddings=True),
        layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}, "gradient_handlers": [TIES]},),
    ),
    LeagueRow(
        name="sharded-ties",
        elsewhere="with a sharded optimizer copies of a tied table are summed after their parts were stepped, "
        "or by another group",
        seen=("Megatron-LM #844", "Megatron-LM #4641"),
        tables=small(model__tie_embeddings=True),
        layouts=(
            {"parallel": {"pp": 2, "dp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "gradient_handlers": [SHARDED, TIES]},
        ),
    ),
    # Where a backward has two halves, sums over ranks wait for the half that computes gradients of weights.
    LeagueRow(
        name="split-backward-dp",
        elsewhere="replicas sum gradients before the second half of a split backward has added to them",
        seen=("pytorch #144530",),
        tables=_DEEP,
        layouts=(
            {"parallel": {"pp": 2, "dp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}, "gradient_handlers": [BUCKETS, TIES]},
        ),
    ),
    LeagueRow(
        name="split-backward-wp",
        elsewhere="shards of weights are freed, and their gradients reduced, before the second half of a split backward",
        seen=("pytorch PR #134052",),
        tables=_DEEP,
        layouts=(
            {
                "parallel": {"pp": 2, "dp": 2, "wp": 2},
                "pipeline": {"use": "pp.zero_bubble_v"},
                "weights": {"use": "isp.communicator"},
            },
        ),
    ),
    # In the norm of a gradient that no rank has whole, each element counts once.
    LeagueRow(
        name="clip-pp",
        elsewhere="each stage clips by its own norm, or a tied table counts once per stage",
        seen=("torchtitan #596", "torchtitan #649", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},),
    ),
    LeagueRow(
        name="clip-wp-pp",
        elsewhere="parts of a sharded weight, and weights that every rank has, are counted alike in the norm",
        seen=("torchtitan #596", "Megatron-LM PR #7227"),
        tables=_TIGHT,
        layouts=(
            {
                "parallel": {"pp": 2, "dp": 2, "wp": 2},
                "pipeline": {"use": "pp.one_f_one_b"},
                "weights": {"use": "isp.communicator"},
            },
        ),
    ),
    # Low-rank adapters train few weights of a frozen model (Hu et al. 2021, LoRA).
    LeagueRow(
        name="adapters-wp",
        elsewhere="of sharded adapters most get no gradient, or each rank trains a factor of its own",
        seen=("torchforge #592", "mcore-bridge PR #173", "Megatron-Bridge #5634"),
        tables=_ADAPTED,
        layouts=({"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}},),
    ),
    LeagueRow(
        name="adapters-pp",
        elsewhere="a stage on which nothing is trained passes no gradient to the adapters before it, or the run ends there",
        seen=("ColossalAI #3889",),
        tables=small(model={"factory": "sley_testing.league.parts:layers", "options": {"trained": [0]}}, optimizer__lr=1e-2),
        layouts=({"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.zero_bubble_h1"}},),
    ),
    LeagueRow(
        name="dropout-pp",
        elsewhere="stages draw other random numbers than one process does, or the recomputation than the forward",
        seen=("Megatron-LM PR #6858",),
        tables=small(model={"factory": "sley_testing.league.parts:layers", "options": {"dropout": 0.2}}, optimizer__lr=1e-2),
        layouts=(
            {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.interleaved"}, "activations": {"use": "core.recompute"}},
        ),
        plain=False,  # a loop of its own draws numbers of its own
    ),
    # Memory that leaves the device comes back as it left, and nothing is dropped meanwhile.
    LeagueRow(
        name="offload",
        elsewhere="with offload only the last micro-batch's gradient arrives, or the weights that come back are older ones",
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
        elsewhere="a run that goes on loses what some ranks had: shards, optimizer states, or the place in their samples",
        seen=("Megatron-Bridge PR #5637", "prime-rl #3332", "ISEEKYAN/Megatron-LM PR #104"),
        tables=small(model__tie_embeddings=True),
        layouts=(_DP, _WP),
        steps=2,
    ),
    LeagueRow(
        name="resume-pp",
        elsewhere="a tied head is made anew from the table when a run goes on, or begins without its optimizer states",
        seen=("Automodel #2571",),
        tables=small(model__tie_embeddings=True),
        layouts=(_DP, _PP),
        steps=2,
    ),
    LeagueRow(
        name="resume-again",
        elsewhere="the second time that a run goes on its samples begin anew, or random numbers are off by a draw",
        seen=("torchtitan #3908", "datasets #8308", "Megatron-Bridge #5257"),
        tables=small(model={"factory": "sley_testing.league.parts:layers", "options": {"dropout": 0.2}}, optimizer__lr=1e-2),
        layouts=(_PP, _WP, _PP),
        steps=2,
        plain=False,  # a loop of its own draws numbers of its own
    ),
    # Formats narrower than fp32.
    LeagueRow(
        name="bf16-masters",
        elsewhere="masters, moments or sums of gradients are kept in bf16, where small updates are rounded away",
        seen=("apex #1728", "speculators PR #765", "Automodel PR #3444"),
        tables=_SLOW,
        layouts=({"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]},),
        steps=16,
        limit=_LIMIT,
        plain=False,  # of one format alone
    ),
    LeagueRow(
        name="resume-masters",
        elsewhere="a run that goes on makes its masters anew from weights in bf16",
        seen=("OpenTau #185",),
        tables=_SLOW,
        layouts=(
            {"parallel": {"dp": 2}, "gradient_handlers": [SHARDED]},
            {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},
        )
        * 8,
        steps=1,  # between two rounds to bf16, which would undo it
        limit=_LIMIT,
        plain=False,
    ),
)
