"""Every family in every layout: losses, gradients and two AdamW steps equal a plain loop over transformers' own model."""

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from hf_families import FAMILIES, computes_in_fp32, has_experts, record_plans, small_config, transformers_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from sley_hf.structure import ModuleNames, find_structure, to_layer_name
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import Tables, changed, small_plan, write_texts
from sley_testing.runs import RunRecord, record

STEPS, GLOBAL, MICRO, LENGTH = 2, 4, 2, 24
BOUNDS = [[0, 24, 24, 24], [0, 7, 24, 24], [0, 5, 12, 24], [0, 23, 24, 24]]
LR, EPS = 1e-3, 1e-6  # a smaller epsilon lets Adam enlarge the rounding errors of the families that compute in fp32
ROUTER_LOSS = 0.1
CHUNKS = {"loss": {"use": "core.cross_entropy", "chunk_tokens": 5}}
LAYOUTS = hf_families.LAYOUTS | {"host": {"parallel": {"dp": 2}, "activations": {"use": "memory.host"}}}
LAYOUTS |= {f"{layout} in chunks": LAYOUTS[layout] | CHUNKS for layout in ("wp", "sp")}


def build_batches() -> list[dict[str, Tensor]]:
    """Returns a batch for each step: rows of packed documents."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.stack([torch.cat([torch.arange(e - s) for s, e in pairwise(row)]) for row in BOUNDS])
    batches = []
    for _ in range(STEPS):
        tokens, labels = (torch.randint(0, 255, (GLOBAL, LENGTH), generator=generator) for _ in range(2))
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -1
        cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
        batches.append({"tokens": tokens, "labels": labels, "positions": positions.clone(), "cu_seqlens": cu_seqlens})
    return batches


def build_tables(folder: Path, layout: str = "", **model: Any) -> Tables:
    """Returns the plan for the weights in `folder`."""
    return changed(
        small_plan(
            model={"use": "hf.decoder", "weights": str(folder), "experts": "eager", **model},
            optimizer={"use": "core.adamw", "lr": LR, "eps": EPS, "weight_decay": 0.0},
            batch={"global_size": GLOBAL, "micro_size": MICRO},
            data__sequence=LENGTH,
        ),
        **LAYOUTS.get(layout, {}),
    )


def convert_to_fp64(function: Any) -> Any:
    """Returns a function of transformers that computes in fp32, changed to fp64."""
    source = inspect.getsource(function).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    names = dict(function.__globals__)
    exec(source, names)
    return names[function.__name__]


def load_balancing_loss(reference: Any, outputs: Sequence[Any]) -> Tensor:
    """Returns transformers' loss of a microbatch. outputs: of its documents."""
    function = sys.modules[type(reference).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
    logits = tuple(map(torch.cat, zip(*(output.router_logits for output in outputs), strict=True)))
    arguments = logits, reference.num_experts, reference.num_experts_per_tok
    loss: Tensor = convert_to_fp64(function)(*arguments)
    torch.testing.assert_close(function(*arguments).double(), loss, rtol=1e-6, atol=0.0)
    return loss


def plain_loop(reference: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Returns losses, the gradients of the first step and the final weights by transformers' names; trains `reference`.

    The loss of a microbatch is that of transformers, times the share of its labels in the batch.
    """
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    options = {"output_router_logits": True} if has_experts(reference.config) else {}
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in build_batches():
        optimizer.zero_grad()
        total = int((batch["labels"] >= 0).sum())
        loss: Any = 0.0
        for start in range(0, GLOBAL, MICRO):
            outputs = []
            for row in range(start, start + MICRO):
                for first_token, end in pairwise(batch["cu_seqlens"][row].tolist()):
                    if end > first_token:
                        outputs.append(reference(input_ids=batch["tokens"][[row], first_token:end], **options))
            labels = batch["labels"][start : start + MICRO].flatten()
            logits = torch.cat([output.logits[0] for output in outputs])
            loss = loss + cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / total
            if options:
                share = int((labels >= 0).sum()) / total
                loss = loss + share * ROUTER_LOSS * load_balancing_loss(reference, outputs)
        loss.backward()
        losses.append(float(loss.detach()))
        first = first or {name: p.grad.clone() for name, p in reference.named_parameters()}
        optimizer.step()
    return losses, first, {name: p.detach().clone() for name, p in reference.named_parameters()}


def assert_equals_plain_loop(run: RunRecord, expected: Any, structure: ModuleNames, tolerance: float) -> None:
    """Compares losses, and the gradients of the first step and the final weights of the parameters that the rank has.

    Weights whose gradient is zero but for rounding are left out, since Adam scales any gradient to the same step.
    """
    losses, gradients, weights = expected
    for row, loss in zip(run.rows, losses, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=tolerance)
    gradients, weights = (
        {to_layer_name(name, structure): value for name, value in tensors.items()} for tensors in (gradients, weights)
    )
    floor = 1e-6 * max(float(gradient.norm()) for gradient in gradients.values())
    own_gradients = run.gradients[0]
    assert_close_gradients({name: gradients[name] for name in own_gradients}, own_gradients, tolerance, floor=floor)
    names = [name for name in own_gradients if float(gradients[name].norm()) > floor]
    assert_close_gradients({n: weights[n] for n in names}, {n: run.weights[n] for n in names}, tolerance)


@pytest.mark.sample(1)  # test_lora.py has a dense family in several layouts
@pytest.mark.parametrize(
    ("family", "names"),
    [("olmoe", ["dp sharded", "1f1b", "wp in chunks", "sp in chunks"]), *((family, [*LAYOUTS]) for family in FAMILIES)],
)
def test_a_family_in_layouts_equals_a_plain_loop(ranks: Any, tmp_path: Path, family: str, names: list[str]) -> None:
    write_texts(tmp_path)
    config = small_config(family)
    reference = transformers_model(config)
    reference.float().save_pretrained(tmp_path / "model")
    expected = plain_loop(reference.double())
    layouts = [layout for layout in names if not layout.startswith("sp") or hf_families.uses_interface(type(reference))]
    if type(reference.get_input_embeddings()) is not torch.nn.Embedding and config.tie_word_embeddings:
        layouts.remove("wp in chunks")  # Gemma 3's class of embeddings is gathered for its layer, and refused by name
    options = {"router_loss": ROUTER_LOSS} if has_experts(config) else {}
    plans = [build_tables(tmp_path / "model", layout, **options) for layout in layouts]
    tolerance = 1e-5 if computes_in_fp32(config) else 1e-10
    structure = find_structure(reference)
    alone = record(build_tables(tmp_path / "model", **options), STEPS, folder=tmp_path, batches=build_batches())
    assert_equals_plain_loop(alone, expected, structure, tolerance)
    experts = [name for name in alone.rows[0] if name.startswith("experts/")]
    assert len(experts) == (3 if options else 0)
    for layout, runs in zip(layouts, record_plans(ranks(2, 580), plans, STEPS, tmp_path, build_batches()), strict=True):
        print(layout)
        for run in runs:
            assert_equals_plain_loop(run, expected, structure, tolerance)
            for row, row_alone in zip(run.rows, alone.rows, strict=True):
                assert [row[name] for name in experts] == pytest.approx([row_alone[name] for name in experts])
        assert {name for run in runs for name in run.gradients[0]} == {to_layer_name(name, structure) for name in expected[1]}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
@pytest.mark.parametrize(
    ("family", "changes", "policy", "num_graphs"),
    [
        ("llama", {}, "core.keep", 2),  # a block and the head
        ("mixtral", {"num_hidden_layers": 3}, "memory.selective", 2),
        # Two kinds of blocks, and the head.
        ("gemma3_text", {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 4}, "core.keep", 3),
    ],
)
def test_compiled_layers_of_one_kind_share_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], policy: str, num_graphs: int
) -> None:
    from torch._dynamo.utils import counters  # loads the compiler

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    write_texts(tmp_path)
    config = small_config(family, **changes)
    transformers_model(config).float().save_pretrained(tmp_path / "model")
    options = {"router_loss": ROUTER_LOSS} if has_experts(config) else {}
    tables = changed(build_tables(tmp_path / "model", **options), parallel={"dp": 1}, model__experts="batched_mm")
    plain = record(tables, 1, folder=tmp_path, batches=build_batches())
    counters.clear()
    tables = changed(tables, model__compile=True, activations={"use": policy})
    compiled = record(tables, 1, folder=tmp_path, batches=build_batches())
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (num_graphs, {})
    assert [row["loss"] for row in compiled.rows] == pytest.approx([row["loss"] for row in plain.rows], rel=1e-10)
    assert_close_gradients(plain.gradients[0], compiled.gradients[0], 1e-5 if computes_in_fp32(config) else 1e-10, floor=1e-9)
