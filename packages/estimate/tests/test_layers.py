"""Layers counted on meta: their FLOPs are torch's own of a real call, halves make a whole, and what is alike has one key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sley_core.assemble import draft_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.call import Keep, Recompute
from sley_core.engine.execute import describe
from sley_core.errors import PlanError
from sley_core.model.attention import once_per_field
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_estimate.layers.distinct import layer_keys
from sley_estimate.layers.operators import PHASES, LayerWork, Operator
from sley_estimate.layers.recorder import OperatorRecorder, moved_bytes
from sley_estimate.layers.trace import trace
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import DeviceTable
from sley_estimate.seconds.layer_seconds import LayerSeconds, seconds_of
from sley_testing.plans import changed, small_plan
from train_cli.on_meta import meta_micro_batch

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
    return trace(layer, value or handed(), more.pop("fields", {}), policy or Keep(), None, *dtypes)[0]


def flops(work: LayerWork, phase: str) -> int:
    return sum(one.flops for one in work.of(phase))


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
    assert first.kept_bytes == alone.kept_bytes, "the backward needs the mask, and nothing else that it did not"


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    fields = {"x": torch.empty(BATCH, WIDTH, device="meta")}
    module = nn.Linear(WIDTH, WIDTH)
    first = trace(Layer("it", module, ()), describe(fields["x"]), {}, Keep(), None, torch.float32, torch.float32)[0]
    assert flops(first, "backward") == flops(first, "forward")


def test_expanded_memory_is_moved_once_and_a_view_not_at_all() -> None:
    assert moved_bytes(torch.empty(1, 5, device="meta").expand(7, 5)) == 20
    work = work_of(Plainest(bias=False))
    assert not [one.name for one in work.forward if "view" in one.name or "transpose" in one.name]
    softmax = next(one for one in work.forward if "softmax" in one.name)
    assert softmax.num_bytes == 2 * BATCH * 8 * 8 * 4


def test_a_look_up_reads_what_it_writes() -> None:
    module = nn.Embedding(1000, WIDTH)
    layer = Layer("it", module, ("input",))
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    work, _ = trace(layer, None, {"input": tokens}, Keep(), None, torch.float32, torch.float32)
    (look_up,) = work.forward
    assert look_up.num_bytes == 2 * 2 * 8 * WIDTH * 4 + 2 * 8 * 8


def test_what_is_written_in_place_is_moved_twice_also_by_an_operator_that_returns_nothing() -> None:
    one, other, step = torch.ones(64), torch.ones(64), torch.ones(())
    with OperatorRecorder() as recorder:
        one.add_(other)
        torch._foreach_add_([one], [other])
        settings = {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.9,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
        torch._fused_adamw_([one], [other], [torch.ones(64)], [torch.ones(64)], [], [step], **settings)
    found = {operator.name: operator.num_bytes for operator in recorder.of("forward")}
    assert found["aten.add_"] == found["aten._foreach_add_"] == 3 * one.nbytes
    assert found["aten._fused_adamw_"] == 7 * one.nbytes + step.nbytes, "gradients are read alone"


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


def test_counting_leaves_the_module_as_it_was() -> None:
    module = Plainest()
    module.register_buffer("seen", torch.zeros(3))
    before = {name: (tensor, tensor.clone()) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    work_of(module, Recompute(frozenset({"it"})))
    after = dict([*module.named_parameters(), *module.named_buffers()])
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert tensor.equal(value)
        assert tensor.grad is None
    assert "forward" not in vars(module.up)


def test_a_layer_that_reads_a_number_is_named_with_its_operator() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(PlanError, match=r"layer `it` \(Asking\) cannot be counted .* aten.*\)") as caught:
        work_of(Asking())
    assert "calibrate" in caught.value.diagnostics[0].hint


def keys(**changes) -> list[str]:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(changed(small_plan(data=data, model__num_layers=4), **changes))
    dataset = open_dataset(plan.data, DataContext(0, "train"))
    model = draft_model(plan, dataset.info)
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


def test_blocks_that_are_recomputed_and_others_differ() -> None:
    assert len(set(keys(activations={"use": "core.recompute", "fraction": 0.5})[1:-1])) == 2


def test_what_is_not_known_to_be_plain_is_like_nothing_else() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thing = object()

    from sley_estimate.layers.distinct import kind_of

    assert kind_of(Holding(), "a") != kind_of(Holding(), "b")
    assert kind_of(Plainest(), "a") == kind_of(Plainest(), "b")
    assert kind_of(Plainest(), "a") != kind_of(Plainest(bias=False), "a")


def device(kind: str) -> DeviceTable:
    matmul = {"fp32": {"flops_per_s": 1e12, "half_flops": 1e9}}
    return DeviceTable(name="it", kind=kind, memory_bandwidth=1e10, launch_s=1e-3, matmul=matmul)


def test_seconds_of_operators_by_hand() -> None:
    """3 ms of memory, 2 ms of products (1e9 FLOPs, as many lost), and two starts of 1 ms each."""
    operators = [Operator("a", 30_000_000), Operator("b", 10, 1_000_000_000, "fp32")]
    assert seconds_of(operators, device("cpu")) == pytest.approx(7e-3)
    assert seconds_of(operators, device("cuda")) == pytest.approx(5e-3), "starts are hidden"
    assert seconds_of([Operator("c", 10)] * 9, device("cuda")) == pytest.approx(9e-3), "the host is slower"


def test_phases_of_a_layer_are_added_where_they_run() -> None:
    one = (Operator("a", 10_000_000),)
    work = LayerWork(*(one * count for count in range(1, 1 + len(PHASES))), num_parameters=0, output_bytes=0, kept_bytes=0)
    found = LayerSeconds.computed(work, device("cpu"))
    assert (found.forward, found.backward) == pytest.approx((2e-3, 2 * 2e-3 + 3 * 2e-3))
    assert (found.input_gradient, found.weight_gradient) == pytest.approx((2 * 2e-3 + 4 * 2e-3, 5 * 2e-3))


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    from sley_estimate.seconds_of_plan import estimate_seconds

    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    optimizer = {"factory": "torch.optim:LBFGS", "lr": 1.0}
    plan = plan_from_dict(small_plan(data=data, optimizer=optimizer, precision={"compute": "fp32"}))
    matmul = {"fp32": {"flops_per_s": 1e12}}
    table = {"name": "it", "kind": "cpu", "memory_bandwidth": 1e10, "launch_s": 1e-3, "matmul": matmul}
    with pytest.raises(PlanError, match="LBFGS"):
        estimate_seconds(plan, 1, machine_from_dict({"format": 1, "device": table}))
