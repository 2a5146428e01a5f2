"""Tests the operators, keys and times of layers, and times in proportion to measured variants."""

from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.engine.call import Keep, Recompute
from sley_core.errors import PlanError
from sley_core.model.attention import once_per_field
from sley_core.model.layers import Layer, Model
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.protocols import SplitLogits
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.layers.times import (
    BYTES_PER_COPIED_BYTE,
    LayerSeconds,
    add_slice_copies,
    estimate_layers,
    operators_s,
    scale_work,
)
from sley_estimate.layers.trace import layer_keys, module_signature, trace_layer, trace_layers
from sley_estimate.machine import DeviceTable, MachineFile, machine_from_dict
from sley_estimate.search.find import Roofline
from sley_estimate.search.layouts import Layouts, list_choices
from sley_estimate.step.estimate import estimate_plan
from sley_estimate.testing import small_machine, timed_layers
from sley_testing.plans import changed, loader_of, small_plan
from sley_trainer.assemble import build_meta_model
from sley_trainer.execute import describe_output
from train_cli.meta_model import meta_micro_batch

WIDTH, BATCH = 32, 4


class Block(nn.Module):
    """Contains two linears and a product of two activations."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        return x + self.down(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def work_of(module: nn.Module, policy=None, **fields: Tensor) -> LayerWork:
    value = describe_output(torch.empty(BATCH, 8, WIDTH, device="meta", requires_grad=True))
    return trace_layer(Layer("it", module, (*fields,)), value, fields, policy or Keep(), None, torch.float32, torch.float32)[0]


def flops(work: LayerWork, phase: str) -> int:
    return sum(operator.flops for operator in getattr(work, phase))


def test_flops_equal_torch_counter() -> None:
    module, x = Block(), torch.randn(BATCH, 8, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    work = work_of(module)
    assert flops(work, "forward") == forward.get_total_flops() > 0
    assert flops(work, "backward") == backward.get_total_flops() == 2 * forward.get_total_flops()


def test_recomputation_repeats_needed_forward() -> None:
    keep, recompute = work_of(Block()), work_of(Block(), Recompute(frozenset({"it"})))
    assert keep.recompute == ()
    assert recompute.forward == keep.forward
    # the backward does not need the last product
    assert set(recompute.recompute) <= set(keep.forward)
    assert 0 < flops(recompute, "recompute") < flops(keep, "forward")
    assert flops(recompute, "backward") == flops(keep, "backward")


def test_shared_results_do_not_count_for_layers() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = once_per_field(lengths, "mask", lambda: lengths.new_ones(1000, WIDTH, dtype=torch.float32).tril())
            return super().forward(x * mask[0])

    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    first, second = (work_of(Masked(), lengths=lengths) for _ in range(2))
    assert astuple(first) == astuple(second)
    plain = work_of(Block())
    assert sum(item.num_bytes for item in first.forward) < 2 * sum(item.num_bytes for item in plain.forward)
    assert first.saved_bytes == plain.saved_bytes, "the backward needs only the mask in addition"


class OwnLogits(SplitLogits):
    """Provides split logits with their cross-entropy."""

    shape, dtype = (BATCH, 8, WIDTH), torch.float32

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        return self.output.sum()

    def logits(self) -> Tensor:
        return self.output.detach()


def test_dicts_and_split_logits_are_counted() -> None:
    class Named(Block):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": super().forward(x)}

    class OwnHead(Block):
        def forward(self, x: dict[str, Tensor]) -> OwnLogits:
            return OwnLogits(super().forward(x["hidden"]))

    model = Model([("0", Named()), ("1", OwnHead())])
    model.layers[0].fields = ("x",)
    labels = torch.empty(BATCH, 8, dtype=torch.int64, device="meta")
    fields = {"x": torch.empty(BATCH, 8, WIDTH, device="meta"), "labels": labels}
    works = trace_layers(plan_from_dict(small_plan()), model, fields, ["0", "1"])
    assert [work.output_bytes for work in works] == [BATCH * 8 * WIDTH * 8] * 2


def test_attention_is_one_kernel_with_half_the_flops_if_causal() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2) if self.mask is None else x
            return F.scaled_dot_product_attention(heads, heads, heads, self.mask, is_causal=self.causal)

    module = Attending()
    module.causal, module.mask = False, None
    full = work_of(module)
    module.causal = True
    half = work_of(module)
    assert [operator.name for operator in half.forward] == ["attention"]
    assert flops(full, "forward") == 2 * flops(half, "forward") == 2 * 2 * BATCH * 8 * 8 * WIDTH
    assert flops(half, "backward") == 2.5 * flops(half, "forward")
    assert half.forward[0].num_bytes == 4 * BATCH * 8 * WIDTH * 4
    module.causal, module.mask = False, torch.empty(8, 8, dtype=torch.bool, device="meta")
    assert flops(work_of(module), "forward") == flops(full, "forward"), "one head of all columns"


def test_norm_is_one_kernel_per_direction() -> None:
    work = work_of(nn.RMSNorm(WIDTH))
    value = BATCH * 8 * WIDTH * 4
    assert [(operator.name, operator.num_bytes) for operator in work.forward] == [("rms_norm", 2 * value + WIDTH * 4)]
    assert (work.backward[0].name, work.backward[0].num_bytes) == ("rms_norm", 3 * value + 2 * WIDTH * 4)


def test_layer_that_reads_values_is_reported() -> None:
    class ReadsValues(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    message = r"layer `it` \(ReadsValues\) cannot run on the meta device, so its operators cannot be counted: .* aten.*\)"
    with pytest.raises(PlanError, match=message) as caught:
        work_of(ReadsValues())
    assert "calibrate" in caught.value.diagnostics[0].hint


SHORT_DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 24}


def keys(**changes) -> list[str]:
    plan = plan_from_dict(changed(small_plan(data=SHORT_DATA, model__num_layers=4), **changes))
    dataset = open_dataset(plan.data, DataContext(0, "train"))
    model = build_meta_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    return layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))


def test_equal_blocks_share_a_key() -> None:
    default_keys = keys()
    assert len(default_keys) == 6
    assert len(set(default_keys)) == 3
    assert default_keys == keys(parallel={"dp": 2}, optimizer__lr=1.0), "the layout and the optimizer do not matter"


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__micro_size": 4},
        {"data__sequence": 32},
        {"precision__compute": "fp32"},
        {"model__ffn_hidden": 28},
        {"model__norm_eps": 1e-3},
        {"activations": {"use": "core.recompute"}},
    ],
    ids=str,
)
def test_changed_block_has_another_key(changes) -> None:
    assert keys(**changes)[1] != keys()[1]


class Holds(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def test_attributes_that_are_not_plain_make_unique_signatures() -> None:
    assert module_signature(Holds(object()), "a") != module_signature(Holds(object()), "b")
    assert module_signature(Holds({"a": Operator("x", 1)}), "a") == module_signature(Holds({"a": Operator("x", 1)}), "b")
    assert module_signature(Holds({"a": Operator("x", 1)}), "a") != module_signature(Holds({"a": Operator("x", 2)}), "a")
    assert module_signature(Holds([torch.ones(2)]), "a") == module_signature(Holds([torch.zeros(2)]), "a")
    assert module_signature(Block(), "a") == module_signature(Block(), "b")
    assert module_signature(Block(), "a") != module_signature(Block(bias=False), "a")


def device(kind: str) -> DeviceTable:
    matmul = {"fp32": {"flops_per_s": 1e12, "half_flops": 1e9}}
    return DeviceTable(name="it", kind=kind, memory_bandwidth=1e10, launch_s=1e-3, matmul=matmul)


def test_seconds_of_operators() -> None:
    """Sums 3 ms of memory, 2 ms of products (1e9 FLOPs and half_flops) and two launches of 1 ms each."""
    operators = [Operator("a", 30_000_000), Operator("b", 10, 1_000_000_000, "fp32")]
    assert operators_s(operators, device("cpu")) == pytest.approx(7e-3)
    assert operators_s(operators, device("cuda")) == pytest.approx(5e-3), "launches overlap"
    assert operators_s([Operator("c", 10)] * 9, device("cuda")) == pytest.approx(9e-3), "the host is slower"
    work = LayerWork(tuple(operators), (), tuple(operators) * 2, 0, 0)
    seconds = LayerSeconds.from_operators(work, device("cuda"), with_host=True)
    assert (seconds.host_forward, seconds.host_backward) == (2e-3, 4e-3), "launches"
    with pytest.raises(PlanError, match=r"no `\[device.matmul.bf16\]`"):
        operators_s([Operator("d", 10, 1, "bf16")], device("cpu"))


def test_unusable_optimizer_is_reported() -> None:
    optimizer = {"factory": "torch.optim:LBFGS", "lr": 1.0}
    plan = plan_from_dict(small_plan(data=SHORT_DATA, optimizer=optimizer, precision={"compute": "fp32"}))
    with pytest.raises(PlanError, match="LBFGS"):
        estimate_plan(plan, 1, machine_from_dict(small_machine(device__kind="cpu")))


WEIGHT = 1000


def work(samples: int, *, copies: int = 0) -> LayerWork:
    """Returns the work of a product with a weight, an attention and `copies` copies on `samples` samples."""
    product = Operator("mm", WEIGHT + 40 * samples, 500 * samples, "fp32")
    attention = Operator("attention", 80 * samples, 60 * samples, "fp32")
    forward = (product, *(Operator("clone", 20 * samples) for _ in range(copies)), attention)
    return LayerWork(forward, (), (product,), 20 * samples, 40 * samples)


@pytest.mark.parametrize("samples", [0.25, 0.5, 3])
def test_scaled_work_reads_full_weights(samples: float) -> None:
    """Includes a layer that copies only with two samples."""
    scaled = scale_work(work(1), work(2, copies=1), samples)
    num_bytes = {operator.name: operator.num_bytes for operator in scaled.forward}
    assert num_bytes == {"mm": WEIGHT + 40 * samples, "attention": 80 * samples, "clone": 20 * samples}
    assert flops(scaled, "forward") == (500 + 60) * samples
    assert scaled.saved_bytes == 40 * samples


def test_attention_over_slices_copies_inputs_and_output() -> None:
    plain, copied = work(2), add_slice_copies(work(2))
    for phase in ("forward", "backward"):
        before, after = (sum(item.num_bytes for item in getattr(layer, phase)) for layer in (plain, copied))
        assert after - before == BYTES_PER_COPIED_BYTE * 160
    assert copied.recompute == plain.recompute


DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 64}
SHAPE = {"use": "models.llama", "num_layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128}


def plan_of(micro_size: int = 2, policy: str = "core.keep") -> Plan:
    batch = {"global_size": 16, "micro_size": micro_size}
    return plan_from_dict(small_plan(data=DATA, model=SHAPE, batch=batch, activations={"use": policy}), loader=loader_of({}))


def measured(plan: Plan, times: float, **keys: Any) -> MachineFile:
    """Returns the small machine with measured layers of `plan`. times: the ratio of measured to counted seconds."""
    return machine_from_dict(small_machine(layers=[table | keys for table in timed_layers(plan, times)]))


def ranked(machine: MachineFile) -> dict[str, float]:
    """Returns the seconds of all layouts of one rank by the formula, fastest first."""
    plan = plan_of()
    choices = list_choices(plan)
    roofline = Roofline(plan, 1, machine, choices)
    layouts = [layout for layout in Layouts(plan, 1, choices).all_layouts() if not layout.activations.offloads_activations]
    return dict(sorted(((str(layout), roofline.estimate(layout).seconds) for layout in layouts), key=lambda item: item[1]))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("times", "micro_size", "policy"), [(2.0, 2, "core.keep"), (0.5, 4, "core.keep"), (2.0, 4, "core.recompute")]
)
def test_measured_variant_does_not_change_order(times: float, micro_size: int, policy: str) -> None:
    counted = ranked(machine_from_dict(small_machine()))
    assert len(counted) > 4
    scaled = ranked(measured(plan_of(micro_size, policy), times, micro_size=micro_size))
    assert list(scaled) == list(counted)
    for name, seconds in scaled.items():
        assert seconds == pytest.approx(times * counted[name], rel=0.05), name


def test_recomputation_is_scaled_like_the_forward() -> None:
    """It belongs to the first half of a split backward. The second half grows with the backward."""
    device = machine_from_dict(small_machine(device__kind="cpu", device__launch_s=0.0)).device
    forward, backward = (Operator("x", int(1e9)),), (Operator("y", int(2e9)),)
    keep, recompute = LayerWork(forward, (), backward, 0, 0), LayerWork(forward, forward, 2 * backward, 0, 0)
    counted = LayerSeconds.from_operators(keep, device)
    measured = LayerSeconds(3 * counted.forward, counted.backward, 0.5 * counted.backward, 0.25 * counted.backward)
    scaled = LayerSeconds.from_variant(recompute, keep, measured, device)
    assert scaled.forward == pytest.approx(3 * counted.forward)
    assert scaled.backward == pytest.approx(3 * counted.forward + 2 * counted.backward)
    assert scaled.input_gradient == pytest.approx(3 * counted.forward + counted.backward)
    assert scaled.weight_gradient == pytest.approx(0.5 * counted.backward)


def test_layers_of_another_model_are_counted() -> None:
    plan = plan_of()
    other_plan = plan_from_dict(small_plan(data=DATA, model={**SHAPE, "ffn_hidden": 192}), loader=loader_of({}))
    machine = measured(other_plan, 2.0)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    layers = estimate_layers(plan, build_meta_model(plan, dataset.info), dataset, machine)
    assert [layer.source for layer in layers][1:-1] == ["counted"] * 3
    assert ranked(machine)
