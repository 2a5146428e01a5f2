"""The rows of the league, in the order of its table. A new one is a record in the module of its idea, and its name here."""

from __future__ import annotations

from train_cli.league.row import LeagueRow
from train_cli.league.rows.adapters import ADAPTERS_PP, ADAPTERS_WP, DROPOUT_PP
from train_cli.league.rows.attention import PACKED_DP, PACKED_SP, SHARED_HEADS_SP
from train_cli.league.rows.memory import OFFLOAD
from train_cli.league.rows.norms import CLIP_PP, CLIP_WP
from train_cli.league.rows.precision import BF16_MASTERS, RESUME_MASTERS
from train_cli.league.rows.resume import RESUME_AGAIN, RESUME_PP, RESUME_WP
from train_cli.league.rows.split_backward import SPLIT_DP, SPLIT_WP
from train_cli.league.rows.ties import SHARDED_TIES, TIED_STAGES
from train_cli.league.rows.vocabulary import VOCABULARY_WP
from train_cli.league.rows.weighting import ACCUMULATION, HELD_OUT, MASKED_RANKS, UNEVEN_RANKS

ROWS: tuple[LeagueRow, ...] = (
    ACCUMULATION,
    UNEVEN_RANKS,
    MASKED_RANKS,
    HELD_OUT,
    VOCABULARY_WP,
    PACKED_DP,
    PACKED_SP,
    SHARED_HEADS_SP,
    TIED_STAGES,
    SHARDED_TIES,
    SPLIT_DP,
    SPLIT_WP,
    CLIP_PP,
    CLIP_WP,
    ADAPTERS_WP,
    ADAPTERS_PP,
    DROPOUT_PP,
    OFFLOAD,
    RESUME_WP,
    RESUME_PP,
    RESUME_AGAIN,
    BF16_MASTERS,
    RESUME_MASTERS,
)
