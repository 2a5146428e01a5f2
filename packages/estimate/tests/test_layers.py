"""Layers counted on meta: FLOPs are those of torch, halves make a whole, equal layers have one key; variants in proportion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sley_core.assemble import build_meta_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.call import Keep, Recompute
from sley_core.engine.execute import describe
from sley_core.errors import PlanError
from sley_core.model.attention import once_per_field
from sley_core.model.layers import Layer, Model
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.protocols import SplitLogits
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.layers.prices import LayerSeconds, PricedLayer, operators_s, price_layers
from sley_estimate.layers.trace import layer_works, trace_layer
from sley_estimate.layers.variants import COPY, add_copies, layer_keys, scale_work
from sley_estimate.machine import DeviceTable, MachineFile, machine_from_dict
from sley_estimate.search.layouts import Layouts, list_choices
from sley_estimate.search.roofline import Roofline
from sley_estimate.step.estimate import estimate_seconds
from sley_estimate.testing import small_machine, timed_layers
from sley_testing.plans import changed, loader_of, small_plan
from train_cli.meta_model import meta_micro_batch

WIDTH, BATCH = 32, 4


class Plainest(nn.Module):
    """Two linears and a product of two activations."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        return x + self.down(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def handed(requires_grad: bool = True) -> tuple:
    value = torch.empty(BATCH, 8, WIDTH, device="meta", requires_grad=requires_grad)
    return describe(value)


def work_of(module: nn.Module, policy=None, value=None, **more) -> LayerWork:
    layer = Layer("it", module, more.pop("names", ()))
    dtypes = torch.float32, torch.float32
    return trace_layer(layer, value or handed(), more.pop("fields", {}), policy or Keep(), None, *dtypes)[0]


def flops(work: LayerWork, phase: str) -> int:
    return sum(one.flops for one in work.operators(phase))


def test_flops_are_those_that_torch_counts_of_a_real_call() -> None:
    module, x = Plainest(), torch.randn(BATCH, 8, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    work = work_of(module)
    assert flops(work, "forward") == forward.get_total_flops() > 0
    assert flops(work, "backward") == backward.get_total_flops() == 2 * forward.get_total_flops()


def test_the_halves_of_a_backward_are_the_whole() -> None:
    work = work_of(Plainest())
    assert flops(work, "input_gradient") + flops(work, "weight_gradient") == flops(work, "backward")
    products = BATCH * 8 * WIDTH * (3 * WIDTH + WIDTH) * 2
    assert flops(work, "weight_gradient") == products, "linears alone; a product of activations belongs to I"


def test_recomputation_is_the_forward_once_more_in_front_of_both_kinds_of_backward() -> None:
    kept, again = work_of(Plainest()), work_of(Plainest(), Recompute(frozenset({"it"})))
    assert kept.recompute == ()
    assert again.forward == kept.forward
    # the last product is not needed: torch stops when it has what the backward saved
    assert set(again.recompute) <= set(kept.forward)
    assert 0 < flops(again, "recompute") < flops(kept, "forward")
    for phase in ("backward", "input_gradient", "weight_gradient"):
        assert flops(again, phase) == flops(kept, phase)


def test_what_layers_share_of_a_micro_batch_is_no_layers_work_nor_kept_by_one() -> None:
    class Masked(Plainest):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = once_per_field(lengths, "mask", lambda: lengths.new_ones(1000, WIDTH, dtype=torch.float32).tril())
            return super().forward(x * mask[0])

    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    first, second = (work_of(Masked(), names=("lengths",), fields={"lengths": lengths}) for _ in range(2))
    assert first == second
    alone = work_of(Plainest())
    assert sum(one.num_bytes for one in first.forward) < 2 * sum(one.num_bytes for one in alone.forward)
    assert first.saved_bytes == alone.saved_bytes, "the backward needs the mask, and nothing else that it did not"


class Named(Plainest):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": super().forward(x)}


class OwnLogits(SplitLogits):
    """Logits with a term of the loss."""

    shape, dtype = (BATCH, 8, WIDTH), torch.float32

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        return self.output.sum()

    def logits(self) -> Tensor:
        return self.output.detach()


class OwnHead(Plainest):
    def forward(self, x: dict[str, Tensor]) -> OwnLogits:
        return OwnLogits(super().forward(x["hidden"]))


def test_a_dict_between_layers_and_logits_of_ones_own_are_counted() -> None:
    model = Model([("0", Named()), ("1", OwnHead())])
    model.layers[0].fields = ("x",)
    labels = torch.empty(BATCH, 8, dtype=torch.int64, device="meta")
    fields = {"x": torch.empty(BATCH, 8, WIDTH, device="meta"), "labels": labels}
    works = layer_works(plan_from_dict(small_plan()), model, fields, ["0", "1"])
    assert [work.output_bytes for work in works] == [BATCH * 8 * WIDTH * 8] * 2


def test_attention_is_one_kernel_that_multiplies_half_of_a_causal_square() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal)

    module = Attending()
    module.causal = False
    whole = work_of(module)
    module.causal = True
    half = work_of(module)
    assert [one.name for one in half.forward] == ["attention"]
    assert flops(whole, "forward") == 2 * flops(half, "forward") == 2 * 2 * BATCH * 8 * 8 * WIDTH
    assert flops(half, "backward") == 2.5 * flops(half, "forward")
    assert half.forward[0].num_bytes == 4 * BATCH * 8 * WIDTH * 4


def test_a_norm_is_one_kernel_each_way() -> None:
    work = work_of(nn.RMSNorm(WIDTH))
    value = BATCH * 8 * WIDTH * 4
    assert [(one.name, one.num_bytes) for one in work.forward] == [("rms_norm", 2 * value + WIDTH * 4)]
    assert (work.backward[0].name, work.backward[0].num_bytes) == ("rms_norm", 3 * value + 2 * WIDTH * 4)


def test_a_layer_that_reads_a_number_is_named_with_its_operator() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(
        PlanError, match=r"layer `it` \(Asking\) cannot run on meta to count its operators: .* aten.*\)"
    ) as caught:
        work_of(Asking())
    assert "calibrate" in caught.value.diagnostics[0].hint


def keys(**changes) -> list[str]:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(changed(small_plan(data=data, model__num_layers=4), **changes))
    dataset = open_dataset(plan.data, DataContext(0, "train"))
    model = build_meta_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    return layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))


def test_blocks_that_are_alike_have_one_key() -> None:
    found = keys()
    assert len(found) == 6
    assert len(set(found)) == 3
    assert found == keys(parallel={"dp": 2}, optimizer__lr=1.0), "the layout and the optimizer do not matter"


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
def test_what_changes_a_block_changes_its_key(changes) -> None:
    assert keys(**changes)[1] != keys()[1]


def test_what_is_not_known_to_be_plain_is_like_nothing_else() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thing = object()

    from sley_estimate.layers.variants import module_signature

    assert module_signature(Holding(), "a") != module_signature(Holding(), "b")
    assert module_signature(Plainest(), "a") == module_signature(Plainest(), "b")
    assert module_signature(Plainest(), "a") != module_signature(Plainest(bias=False), "a")


def device(kind: str) -> DeviceTable:
    matmul = {"fp32": {"flops_per_s": 1e12, "half_flops": 1e9}}
    return DeviceTable(name="it", kind=kind, memory_bandwidth=1e10, launch_s=1e-3, matmul=matmul)


def test_seconds_of_operators_by_hand() -> None:
    """3 ms of memory, 2 ms of products (1e9 FLOPs, as many lost), and two starts of 1 ms each."""
    operators = [Operator("a", 30_000_000), Operator("b", 10, 1_000_000_000, "fp32")]
    assert operators_s(operators, device("cpu")) == pytest.approx(7e-3)
    assert operators_s(operators, device("cuda")) == pytest.approx(5e-3), "starts are hidden"
    assert operators_s([Operator("c", 10)] * 9, device("cuda")) == pytest.approx(9e-3), "the host is slower"
    with pytest.raises(PlanError, match=r"no `\[device.matmul.bf16\]`"):
        operators_s([Operator("d", 10, 1, "bf16")], device("cpu"))


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:

    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    optimizer = {"factory": "torch.optim:LBFGS", "lr": 1.0}
    plan = plan_from_dict(small_plan(data=data, optimizer=optimizer, precision={"compute": "fp32"}))
    matmul = {"fp32": {"flops_per_s": 1e12}}
    table = {"name": "it", "kind": "cpu", "memory_bandwidth": 1e10, "launch_s": 1e-3, "matmul": matmul}
    with pytest.raises(PlanError, match="LBFGS"):
        estimate_seconds(plan, 1, machine_from_dict({"format": 1, "device": table}))


WEIGHT = 1000


def work(samples: int, *, copies: int = 0) -> LayerWork:
    """A product of a weight, an attention, and so many copies of what it gives, all on `samples` samples."""
    product = Operator("mm", WEIGHT + 40 * samples, 500 * samples, "fp32")
    attention = Operator("attention", 80 * samples, 60 * samples, "fp32")
    forward = (product, *(Operator("clone", 20 * samples) for _ in range(copies)), attention)
    return LayerWork(forward, (), (product,), (product,), (), WEIGHT, 20 * samples, 40 * samples)


@pytest.mark.parametrize("samples", [0.25, 0.5, 3])
def test_a_weight_is_read_whole_for_a_share_of_a_sample(samples: float) -> None:
    """A layer that copied on two samples and not on one was taken for a share of its work, its weights' bytes included."""
    found = scale_work(work(1), work(2, copies=1), samples)
    by_name = {one.name: one for one in found.forward}
    assert by_name["mm"].num_bytes == WEIGHT + 40 * samples
    assert by_name["mm"].flops == 500 * samples
    assert by_name["attention"].num_bytes == 80 * samples
    assert by_name["clone"].num_bytes == 20 * samples
    assert found.saved_bytes == 40 * samples


def test_a_swapped_attention_copies_what_it_reads_and_writes_there_and_back() -> None:
    plain, copied = work(2), add_copies(work(2))
    for phase in ("forward", "backward", "input_gradient"):
        more = sum(one.num_bytes for one in copied.operators(phase)) - sum(one.num_bytes for one in plain.operators(phase))
        assert more == COPY * 160
    assert copied.recompute == plain.recompute
    assert copied.weight_gradient == plain.weight_gradient


DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 64}
SHAPE = {"use": "models.llama", "num_layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128}


def plan_of(micro_size: int = 2, policy: str = "core.keep") -> Plan:
    batch = {"global_size": 16, "micro_size": micro_size}
    return plan_from_dict(small_plan(data=DATA, model=SHAPE, batch=batch, activations={"use": policy}), loader=loader_of({}))


def priced(plan: Plan, machine: MachineFile) -> list[PricedLayer]:
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    return price_layers(plan, model, meta_micro_batch(plan, dataset), machine)


def measured(plan: Plan, times: float, **more: Any) -> MachineFile:
    """The small machine, on which each layer of `plan` was measured to take so many times what is counted."""
    return machine_from_dict(small_machine(layers=[table | more for table in timed_layers(plan, times)]))


def ranked(machine: MachineFile) -> dict[str, float]:
    """The seconds of all layouts of one rank by the formula, in order."""
    plan = plan_of()
    choices = list_choices(plan)
    roofline = Roofline(plan, 1, machine, choices)
    layouts = [one for one in Layouts(plan, 1, choices, ["offload"]).all_layouts() if not one.activations.copies]
    return dict(sorted(((str(one), roofline.estimate(one).seconds) for one in layouts), key=lambda item: item[1]))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("times", "micro_size", "policy"), [(2.0, 2, "core.keep"), (0.5, 4, "core.keep"), (2.0, 4, "core.recompute")]
)
def test_layers_of_one_variant_change_no_order(times: float, micro_size: int, policy: str) -> None:
    """Recomputation was first where it alone was counted, or where it alone was measured, on a faster machine."""
    counted = ranked(machine_from_dict(small_machine()))
    assert len(counted) > 4
    found = ranked(measured(plan_of(micro_size, policy), times))
    assert list(found) == list(counted)
    for name, seconds in found.items():
        assert seconds == pytest.approx(times * counted[name], rel=0.05), name


def test_the_variant_with_about_as_many_samples_counts() -> None:
    """Small layers and large ones are seldom as far from what is counted."""
    few, many = measured(plan_of(1), 3.0, micro_size=1), measured(plan_of(8), 1.0, micro_size=8)
    machine = machine_from_dict(small_machine(layers=[one.model_dump() for one in (*few.layers, *many.layers)]))
    bare = machine_from_dict(small_machine())
    for micro_size, times in ((2, 3.0), (4, 1.0)):
        plan = plan_of(micro_size, "core.recompute")
        found, counted = priced(plan, machine), priced(plan, bare)
        assert found[1].seconds.backward == pytest.approx(times * counted[1].seconds.backward, rel=1e-2), micro_size


def test_a_layer_that_runs_again_does_so_as_its_forward_was_measured() -> None:
    device = machine_from_dict(small_machine(device__kind="cpu", device__launch_s=0.0)).device
    forward, backward = (Operator("x", int(1e9)),), (Operator("y", int(2e9)),)
    keep = LayerWork(forward, (), backward, backward, (), 0, 0, 0)
    again = LayerWork(forward, forward, backward, backward, (), 0, 0, 0)
    counted = LayerSeconds.from_operators(keep, device)
    slow = LayerSeconds(3 * counted.forward, counted.backward, counted.input_gradient, 0.0)
    found = LayerSeconds.scaled(again, keep, slow, device)
    assert found.forward == pytest.approx(3 * counted.forward)
    assert found.backward == pytest.approx(3 * counted.forward + counted.backward)


def test_a_layer_of_another_model_stays_counted() -> None:
    """It has nothing to do with what was measured."""
    plan = plan_of()
    other = plan_from_dict(small_plan(data=DATA, model={**SHAPE, "ffn_hidden": 192}), loader=loader_of({}))
    machine = measured(other, 2.0)
    assert [one.source for one in priced(plan, machine)][1:-1] == ["counted"] * 3
    assert ranked(machine)
