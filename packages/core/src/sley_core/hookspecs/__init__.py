"""The hooks of Sley. They assemble a run; none is called in the step loop.

Every hook is called once, on every rank, before the first step and without communication, except the three notifications at the
end of `plan_and_run`. Hooks return records; core indexes them by name and follows the plan's order, never the order of
discovery or registration.

Compatibility: a new hook or a new trailing argument is a minor version (pluggy passes only the arguments that an implementation
names). Before a minor version removes one, an earlier version warns.
"""

from sley_core.hookspecs.markers import PROJECT, hookimpl, hookspec
from sley_core.hookspecs.memory import sley_activation_policies, sley_memory_pools, sley_offload_managers
from sley_core.hookspecs.offers import (
    sley_datasets,
    sley_gradient_handlers,
    sley_losses,
    sley_lr_schedules,
    sley_metrics_writers,
    sley_models,
    sley_optimizers,
    sley_partitioners,
    sley_scheduler_hooks,
    sley_schedules,
    sley_sequence_attentions,
    sley_stage_links,
    sley_weight_communicators,
)
from sley_core.hookspecs.plan_and_run import (
    sley_check_plan,
    sley_process_groups,
    sley_run_finished,
    sley_run_started,
    sley_step_finished,
)

__all__ = [
    "PROJECT",
    "hookimpl",
    "hookspec",
    "sley_activation_policies",
    "sley_check_plan",
    "sley_datasets",
    "sley_gradient_handlers",
    "sley_losses",
    "sley_lr_schedules",
    "sley_memory_pools",
    "sley_metrics_writers",
    "sley_models",
    "sley_offload_managers",
    "sley_optimizers",
    "sley_partitioners",
    "sley_process_groups",
    "sley_run_finished",
    "sley_run_started",
    "sley_scheduler_hooks",
    "sley_schedules",
    "sley_sequence_attentions",
    "sley_stage_links",
    "sley_step_finished",
    "sley_weight_communicators",
]
