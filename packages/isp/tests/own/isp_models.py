"""Models, data and a loss of the tests' plans: `factory = "isp_models:mixed"`."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import IGNORE_INDEX, DataContext, DataInfo, Field
from sley_core.model.layers import Model

WIDTH = 6
VOCABULARY = 11
CLASSES = 4
"""Of `Labelled`; over three ranks two, two and none."""

COLUMNS = 5
"""Of the tables of `tables`; over two ranks three and two."""

Layers = list[tuple[str, nn.Module]]


class Points:
    """A dataset of four tokens per sample, with a target for each."""

    info = DataInfo({"tokens": Field("int64"), "y": Field("float64")}, vocab_size=VOCABULARY)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(VOCABULARY, (4,), generator=generator)
        return {"tokens": tokens, "y": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)}


class Labelled:
    """A dataset of five tokens per sample. Some labels are ignored, and all labels of the third sample."""

    info = DataInfo({"tokens": Field("int64", ids="token"), "labels": Field("int64", ids="label")}, vocab_size=CLASSES)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens, labels = torch.randint(CLASSES, (2, 5), generator=generator)
        labels[: 5 if index % 8 == 2 else index % 3] = IGNORE_INDEX
        return {"tokens": tokens, "labels": labels}


class Beyond(Labelled):
    """Every sample has a class that the head lacks. The fields do not declare labels as token ids."""

    info = DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=CLASSES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["labels"][1] = CLASSES + 1
        return sample


class Embed(nn.Module):
    def __init__(self, rows: int = VOCABULARY, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def between(name: str, *blocks: nn.Module, head: bool = True) -> Layers:
    """Returns an embedding, `blocks` and a linear. One block is called `name`."""
    named = [(name if len(blocks) == 1 else f"{name}{at}", block) for at, block in enumerate(blocks)]
    return [("embed", Embed()), *named, *([("head", nn.Linear(WIDTH, WIDTH))] if head else [])]


class Mixed(nn.Module):
    """A block of plain linears with an attention. They have different sizes, some have no bias, one is used twice, and the
    order of their registration is not that of their use.
    """

    def __init__(self, ffn: int) -> None:
        super().__init__()
        self.down = nn.Linear(ffn, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, ffn, bias=ffn % 2 == 0)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden = hidden + self.twice(self.twice(hidden).tanh())
        return hidden + self.down(self.up(hidden).tanh())


def mixed() -> Layers:
    """Returns three blocks of different sizes."""
    return between("block", *(Mixed(ffn) for ffn in (7, 12, 5)))


class Recomputing(Mixed):
    """Recomputes itself with one of torch's checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(9)
        self.reentrant = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


class Adapted(nn.Module):
    """A frozen linear with a small trainable pair (LoRA), and a linear with only a trainable bias."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)
        self.shifted = nn.Linear(WIDTH, WIDTH)
        self.shifted.weight.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.shifted(self.base(hidden) + self.up(self.down(hidden)))


def frozen_start() -> Layers:
    """Returns a model with frozen layers before the second block."""
    layers = mixed()
    for _, module in layers[:2]:
        module.requires_grad_(False)
    return layers


class Autocast(nn.Module):
    """Computes in bf16, whatever the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.plain(self.linear(hidden).tanh())
        return hidden + out.to(hidden.dtype)


def autocast() -> Layers:
    return between("block", Autocast(), Autocast(), head=False)


# -- weights that are used in other ways than by calling each module once


class SharedTable(nn.Module):
    """Holds a parameter of another module, but is no linear."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.table.t() @ self.table)


def tied_to_no_linear() -> Layers:
    embed = Embed()
    return [("embed", embed), ("head", SharedTable(embed.table.weight))]


class Doubled(nn.Embedding):
    """A subclass of an embedding, so its table is not sharded."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 2.0 * super().forward(tokens)


class EmbedDoubled(Embed):
    def __init__(self) -> None:
        super().__init__()
        self.table = Doubled(VOCABULARY, WIDTH)


class Decoder(nn.Module):
    """A linear with a separate bias and a weight that another type of module also holds, as in BERT's heads."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = weight
        self.back = nn.Linear(VOCABULARY, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.back(self.decoder(hidden).tanh())


def half_sharded() -> Layers:
    embed = EmbedDoubled()
    return [("embed", embed), ("middle", nn.Linear(WIDTH, WIDTH)), ("head", Decoder(embed.table.weight))]


class Encoder(nn.Module):
    """torch's block, which in an evaluation reads the weights of its linears instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 13, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


class ReadsWeight(nn.Module):
    """Multiplies by the result of `reader` for its linear, if that is set."""

    reader: ClassVar[Callable[[nn.Linear], Any] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.back = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        asked = 1.0 if ReadsWeight.reader is None else ReadsWeight.reader(self.linear)
        return self.back(self.linear(hidden).tanh()) * asked


def reader() -> Layers:
    return between("reader", ReadsWeight())


class Scaled(nn.Module):
    """Reads a frozen weight, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.frozen.weight.norm() + self.frozen(hidden)


def scaled() -> Layers:
    return between("scaled", Scaled())


class Replaced(nn.Module):
    """Has a linear with weight norm, one with a replaced forward, and one that `functional_call` calls with other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.doubled = nn.Linear(WIDTH, WIDTH)
        self.doubled.forward = lambda x: 2.0 * F.linear(x, self.doubled.weight, self.doubled.bias)
        self.free = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        tensors = {"weight": hidden.mean((0, 1)).outer(hidden.sum((0, 1))), "bias": hidden.mean((0, 1))}
        hidden = hidden + torch.func.functional_call(self.free, tensors, (hidden,)).tanh()
        return self.free(input=self.doubled(self.normed(hidden)))


def unusual() -> Model:
    """Returns a model of blocks of several types."""

    def first_values(module: nn.Module, name: str) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -0.3, 0.4)

    blocks = (Adapted(), Recomputing(reentrant=True), Encoder(), Adapted(), Replaced())
    return Model(between("block", *blocks), first_values)


# -- tables that are cut by columns


class Tables(nn.Module):
    """Embeds tokens, previous tokens by the same table, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, COLUMNS, padding_idx=3)
        self.positions = nn.Embedding(9, COLUMNS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + 0.5 * self.tokens(tokens.roll(1, 1)).tanh() + self.positions(positions)


class SecondLookup(nn.Module):
    """Reads the first layer's table again in another embedding, with gradients of its input."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.up = nn.Linear(COLUMNS, COLUMNS)
        self.table = nn.Embedding(VOCABULARY, COLUMNS)
        self.table.weight = table.weight

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.up(hidden).tanh() + self.table(tokens)


def tables(frozen: str = "") -> Layers:
    """Returns a model whose layer `frozen` is not trainable."""
    first = Tables()
    norm, head = nn.LayerNorm(COLUMNS), nn.Linear(COLUMNS, WIDTH)
    layers: Layers = [("embed", first), ("again", SecondLookup(first.tokens)), ("norm", norm), ("head", head)]
    for name, module in layers:
        module.requires_grad_(name != frozen)
    return layers


def limited() -> Layers:
    """Returns a model with a table that its forward writes, so it is not sharded."""
    return [("embed", Embed(max_norm=1.0)), ("head", nn.Linear(WIDTH, WIDTH))]


class ReadsTable(Embed):
    """Reads its table without a call of the embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.table.weight.sum()


def reads_table() -> Layers:
    return [("embed", ReadsTable()), ("head", nn.Linear(WIDTH, WIDTH))]


# -- classifiers of `Labelled`, whose head may be vocabulary-parallel


def classifier(frozen: str = "") -> Layers:
    """Returns an embedding, a linear and a head with a bias. The layer `frozen` is not trainable."""
    layers: Layers = [("embed", Embed(CLASSES)), ("middle", nn.Linear(WIDTH, WIDTH)), ("head", nn.Linear(WIDTH, CLASSES))]
    for name, module in layers:
        module.requires_grad_(name != frozen)
    return layers


class Changed(nn.Module):
    """Subtracts the mean from the logits of its linear."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.output(hidden)
        return logits - logits.mean()


def changed() -> Layers:
    return [("embed", Embed(CLASSES)), ("head", Changed())]


def two_linears() -> Layers:
    return [("embed", Embed(CLASSES)), ("head", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)))]


def shared_head() -> Layers:
    head = nn.Linear(WIDTH, CLASSES)
    return [("embed", Embed(CLASSES)), ("table", SharedTable(head.weight)), ("head", head)]
