"""Pipeline schedules and partitioners, which decide what each stage runs. They are pure functions, and import no torch.

A partitioner splits layers into positions: `(costs, num_positions) -> boundaries`. A position is one chunk of the model; each
stage holds at least one position. With the boundaries (0, 3, 5, 9), position 0 has the layers 0 1 2, position 1 has 3 4, and
position 2 has 5 6 7 8.

A schedule returns one list of compute actions per stage: `(num_stages, num_chunks, num_microbatches) -> lists`. In the drawings
the number of stages P and the number of microbatches M are 4. F is a forward, B a backward. A split backward consists of I,
which computes input gradients, and W, which computes weight gradients. The digit is the microbatch. Uppercase letters are
chunk 0, and lowercase letters are chunk 1. Three characters are one unit of time. The time of an F is filled with `-`, the time
of a B or I with `=`, and the time of a W with `~`. Dots mark idle time.
"""

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, combinations, pairwise
from math import inf

from sley_core.api.actions import Action, Delivery, Kind, Placement, Schedule, loop, v_placement
from sley_core.errors import Place, PlanError
from sley_pp import plugin

Boundaries = tuple[int, ...]
"""`num_positions + 1` strictly ascending numbers from 0 to the number of layers."""


def check_num_layers(num_layers: int, num_positions: int) -> None:
    """Raises PlanError "partition-empty" if there are fewer layers than positions."""
    if num_layers < num_positions:
        message = f"{num_layers} layers cannot be split into {num_positions} chunks, since each chunk needs a layer"
        hint = f"use at most {num_layers} stages x chunks" if num_layers else "use a model with layers"
        raise PlanError("partition-empty", message, path=("parallel", "pp"), hint=hint)


def uniform_boundaries(num_layers: int, num_positions: int) -> Boundaries:
    """Returns boundaries that split the layers evenly over the positions. If the layers do not divide evenly, positions in the
    middle get one more layer, since the embedding and the head usually cost more than a block. Raises PlanError
    "partition-empty" if there are too few layers.
    """
    check_num_layers(num_layers, num_positions)
    size, num_larger = divmod(num_layers, num_positions)
    first_larger = (num_positions - num_larger) // 2
    boundaries = [0]
    for position in range(num_positions):
        boundaries.append(boundaries[-1] + size + (first_larger <= position < first_larger + num_larger))
    return tuple(boundaries)


def balanced_boundaries(costs: Sequence[float], num_positions: int) -> Boundaries:
    """Returns the boundaries with the least cost of the most expensive position and, among these, the least sum of squared
    costs. costs: a non-negative cost per layer. Raises PlanError "partition-empty" if there are fewer layers than positions.
    """
    check_num_layers(len(costs), num_positions)
    prefix_sums = [0.0, *accumulate(costs)]
    return _most_even_boundaries(prefix_sums, num_positions, _least_maximum(prefix_sums, num_positions))


def _least_maximum(prefix_sums: Sequence[float], num_positions: int) -> float:
    """Returns the least possible cost of the most expensive position. prefix_sums: the costs of the first 0, 1, ... layers."""

    def fits(limit: float) -> bool:
        """Returns whether the layers fit into the positions if no position costs more than `limit`."""
        start, num_used = 0.0, 1
        for previous, total in pairwise(prefix_sums):
            if total - start > limit:
                start, num_used = previous, num_used + 1
        return num_used <= num_positions

    largest = max(end - start for start, end in pairwise(prefix_sums))
    limits = sorted({end - start for start, end in combinations(prefix_sums, 2) if end - start >= largest})
    return limits[bisect_left(limits, True, key=fits)]


def _most_even_boundaries(prefix_sums: Sequence[float], num_positions: int, max_cost: float) -> Boundaries:
    """Returns the boundaries with the least sum of squared costs for which no position costs more than `max_cost`."""
    num_layers = len(prefix_sums) - 1
    squares = [0.0] + [inf] * num_layers
    all_starts: list[list[int]] = []
    for position in range(num_positions):
        next_squares, starts = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(position + 1, num_layers + 1):
            for start in range(end - 1, position - 1, -1):
                cost = prefix_sums[end] - prefix_sums[start]
                if cost > max_cost:
                    break
                if squares[start] + cost * cost < next_squares[end]:
                    next_squares[end], starts[end] = squares[start] + cost * cost, start
        squares = next_squares
        all_starts.append(starts)
    boundaries = [num_layers]
    for starts in reversed(all_starts):
        boundaries.append(starts[boundaries[-1]])
    return tuple(reversed(boundaries))


Partitioner = Callable[[Sequence[float], int], Boundaries]
"""A function `(costs, num_positions) -> boundaries`. costs: the cost of each layer."""


def build_uniform(config: plugin.UniformPartitionConfig) -> Partitioner:
    """Returns the partitioner `pp.uniform`, which ignores costs: the sizes of two positions differ by at most one layer."""
    return lambda costs, num_positions: uniform_boundaries(len(costs), num_positions)


def build_balanced(config: plugin.BalancedPartitionConfig | plugin.MeasuredPartitionConfig) -> Partitioner:
    """Returns a partitioner that balances `config.layer_costs`, or its argument `costs` if `layer_costs` is None. The
    partitioner raises PlanError "partition-length" if `layer_costs` has another length, and the error of `balanced_boundaries`.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        layer_costs = costs if config.layer_costs is None else config.layer_costs
        if len(layer_costs) != len(costs):
            message = f"`layer_costs` must have one number for each of the {len(costs)} layers, but has {len(layer_costs)}"
            raise PlanError("partition-length", message, path=("partition", "layer_costs"))
        return balanced_boundaries(layer_costs, num_positions)

    return partition


def build_explicit(config: plugin.ExplicitPartitionConfig) -> Partitioner:
    """Returns a partitioner that gives position i `config.layers[i]` layers. The partitioner raises PlanError
    "partition-length" unless `layers` has one number per position, and "partition-layers" unless the numbers add up to the
    number of layers.
    """

    def partition(costs: Sequence[float], num_positions: int) -> Boundaries:
        layers, path = config.layers, ("partition", "layers")
        if len(layers) != num_positions:
            message = f"`layers` must have {num_positions} numbers (stages x chunks), but has {len(layers)}"
            raise PlanError("partition-length", message, path=path)
        if sum(layers) != len(costs):
            message = f"`layers` must add up to the model's {len(costs)} layers, but adds up to {sum(layers)}"
            raise PlanError("partition-layers", message, path=path)
        return (0, *accumulate(layers))

    return partition


Symbol = tuple[Kind, int]
"""The type and chunk of an action, without its microbatch."""

F: Symbol = (Kind.FORWARD, 0)
B: Symbol = (Kind.BACKWARD, 0)
F0, F1 = F, (Kind.FORWARD, 1)
I0, I1 = (Kind.INPUT_GRADIENT, 0), (Kind.INPUT_GRADIENT, 1)
"""Symbols for the patterns below: F and B for one chunk per stage, and F and I with the number of the chunk for two."""


def number_microbatches(symbols: Iterable[Symbol]) -> list[Action]:
    """Returns the actions of a pattern. The n-th occurrence of a symbol, counted from 0, becomes the action of microbatch n."""
    counts: Counter[Symbol] = Counter()
    actions = []
    for kind, chunk in symbols:
        actions.append(Action(kind, chunk, counts[kind, chunk]))
        counts[kind, chunk] += 1
    return actions


def one_f_one_b(num_stages: int, num_chunks: int, num_microbatches: int, backward: Symbol = B) -> list[list[Action]]:
    """Returns the 1F1B lists: one forward, then one `backward` (arXiv 2006.09503), with one chunk per stage.

        stage 0  F0-F1-F2-F3-..................B0====...B1====...B2====...B3====
        stage 1  ...F0-F1-F2-............B0====F3-B1====...B2====...B3====......
        stage 2  ......F0-F1-......B0====F2-B1====F3-B2====...B3====............
        stage 3  .........F0-B0====F1-B1====F2-B2====F3-B3====..................

    The step is as long as with GPipe, but stage s holds at most min(P - s, M) microbatches.
    """
    lists = []
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        lists.append(number_microbatches([F] * warmup + [F, backward] * (num_microbatches - warmup) + [backward] * warmup))
    return lists


def gpipe(num_stages: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the GPipe lists: all forwards, then all backwards (arXiv 1811.06965), with one chunk per stage.

        stage 0  F0-F1-F2-F3-...........................B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-F3-..................B0====B1====B2====B3====......
        stage 2  ......F0-F1-F2-F3-.........B0====B1====B2====B3====............
        stage 3  .........F0-F1-F2-F3-B0====B1====B2====B3====..................

    This is the simplest schedule, but it needs the most memory, since each stage holds all M microbatches.
    """
    return [number_microbatches([F] * num_microbatches + [B] * num_microbatches) for _ in range(num_stages)]


def interleaved(num_stages: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the interleaved 1F1B lists: several chunks per stage, placed in a loop (arXiv 2104.04473).

        stage 0  F0-F1-F2-F3-f0-f1-f2-f3-..................b0====...b1====...b2====...b3====B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-F3-f0-f1-f2-f3-.........b0====...b1====...b2====...b3====B0====B1====B2====B3====......
        stage 2  ......F0-F1-F2-F3-f0-f1-f2-...b0====f3-b1====...b2====...b3====B0====B1====B2====B3====............
        stage 3  .........F0-F1-F2-F3-f0-b0====f1-b1====f2-b2====f3-b3====B0====B1====B2====B3====..................

    Microbatches are grouped into rounds. On each stage, all microbatches of a round run chunk 0, then all run chunk 1 and so
    on, before the next round starts. A round has at least P microbatches if M >= P, since otherwise a stage would wait for its
    own output. If M is not a multiple of P, some rounds are larger, which costs memory but no time. If M < P, stages idle.

    With rounds of P microbatches and C chunks per stage, stage s holds at most P x C + P - 1 - 2s chunk inputs, and the bubble
    is 1/C of 1F1B's bubble.
    """
    rounds = round_sizes(num_stages, num_microbatches)
    descending = range(num_chunks - 1, -1, -1)
    forwards: list[Symbol] = [(Kind.FORWARD, chunk) for size in rounds for chunk in range(num_chunks) for _ in range(size)]
    backwards: list[Symbol] = [(Kind.BACKWARD, chunk) for size in rounds for chunk in descending for _ in range(size)]
    lists = []
    for stage in range(num_stages):
        # The forwards before the first backward: those of the first round's earlier chunks, and two for each later stage, since
        # the last chunk's forward must pass that stage and its backward must return through it.
        warmup = min((num_chunks - 1) * rounds[0] + 2 * (num_stages - 1 - stage), len(forwards))
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        lists.append(number_microbatches([*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]))
    return lists


def round_sizes(num_stages: int, num_microbatches: int) -> list[int]:
    """Returns the sizes of as many rounds of at least `num_stages` microbatches as possible, but at least one round, in
    descending order. The sizes differ by at most one, and add up to `num_microbatches`.
    """
    num_rounds = max(1, num_microbatches // num_stages)
    size, num_larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * num_larger + [size] * (num_rounds - num_larger)


def insert_weight_gradients(lists: Sequence[Sequence[Action]], placement: Placement, max_inputs: int) -> list[list[Action]]:
    """Returns `lists`, which contain F and I, with a W inserted for every I. max_inputs: the number of chunk inputs that a
    stage should hold at most.

    Simulates all stages in ticks, with at most one action per stage and tick. A stage runs the next action of its list if an
    earlier tick has produced the action's input, and otherwise its oldest pending W. A stage that holds `max_inputs` chunk
    inputs runs a pending W first, except between an F and the following I, since earlier stages wait for that I.

    The drawing shows a stage of ZB-H1 without and with its W:

        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=...I3=
        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=W0~I3=W1~W2~W3~
    """
    queues = [deque(actions) for actions in lists]
    results: list[list[Action]] = [[] for _ in lists]
    weight_queues: list[deque[Action]] = [deque() for _ in lists]
    num_inputs = [0] * len(lists)
    deliveries: set[Delivery | None] = {None}  # None is the input of an action that needs none

    def can_run(stage: int) -> bool:
        """Returns whether the input of the stage's next action is available, and no W must run before this action."""
        action, last_actions = queues[stage][0], results[stage][-1:]
        is_pair = action.kind is Kind.INPUT_GRADIENT and any(last.kind is Kind.FORWARD for last in last_actions)
        is_full = bool(weight_queues[stage]) and num_inputs[stage] >= max_inputs and not is_pair
        return not is_full and placement.input_of(action, placement.position(stage, action.chunk)) in deliveries

    has_progress = True
    while has_progress:
        has_progress = False
        new_deliveries: set[Delivery | None] = set()
        for stage, result in enumerate(results):
            if queues[stage] and can_run(stage):
                action = queues[stage].popleft()
                if action.kind is Kind.FORWARD:
                    num_inputs[stage] += 1
                else:
                    weight_queues[stage].append(Action(Kind.WEIGHT_GRADIENT, action.chunk, action.micro))
                new_deliveries.add(placement.output_of(action, placement.position(stage, action.chunk)))
            elif weight_queues[stage]:
                action = weight_queues[stage].popleft()
                num_inputs[stage] -= 1
            else:
                continue
            result.append(action)
            has_progress = True
        deliveries |= new_deliveries
    assert not any(queues), f"the stages are deadlocked: {queues}"
    return results


def zero_bubble_h1(num_stages: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the ZB-H1 lists: 1F1B with split backwards (arXiv 2401.10241, section 2.1), with one chunk per stage.

        stage 0  F0-F1-F2-F3-.........I0=W0~I1=W1~I2=W2~I3=W3~
        stage 1  ...F0-F1-F2-......I0=F3-I1=W0~I2=W1~I3=W2~W3~
        stage 2  ......F0-F1-...I0=F2-I1=F3-I2=W0~I3=W1~W2~W3~
        stage 3  .........F0-I0=F1-I1=F2-I2=F3-I3=W0~W1~W2~W3~

    The previous stage waits only for I. Each stage defers its W until it holds min(P, M) microbatches, which is the peak of
    stage 0 in 1F1B. If F, I and W stand for the times of these actions, the bubble is (P - 1)(F + I - W), provided that W <= F
    and W <= I. If all three times are equal, this is a third of the bubble of 1F1B.
    """
    lists = one_f_one_b(num_stages, num_chunks, num_microbatches, backward=I0)
    return insert_weight_gradients(lists, loop(num_stages), max_inputs=num_stages)


def zero_bubble_v(num_stages: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the ZB-V lists: two chunks per stage in a V, with split backwards (arXiv 2401.10241, section 6).
    The drawing shows the start of a step with P = 4 and M >= 8; the module's docstring explains its symbols.

        stage 0  F0-F1-F2-F3-F4-F5-F6-f0-i0=w0~f1-i1=w1~f2-i2=w2~f3-i3=w3~F7-I0=W0~f4-i4=w4~ ...
        stage 1  ...F0-F1-F2-F3-F4-f0-F5-f1-i0=w0~f2-i1=w1~f3-i2=w2~F6-I0=W0~f4-i3=w3~F7-I1= ...
        stage 2  ......F0-F1-F2-f0-F3-f1-F4-f2-i0=w0~f3-i1=w1~F5-I0=W0~f4-i2=w2~F6-I1=W1~f5- ...
        stage 3  .........F0-f0-F1-f1-F2-f2-F3-f3-i0=w0~F4-I0=W0~f4-i1=w1~F5-I1=W1~f5-i2=w2~ ...

    A sample goes down the stages through chunk 0 and up again through chunk 1. Stage 0 has both the embedding and the loss, so
    its first backward directly follows a forward. If M < 2P - 1, the pattern has more than M microbatches. The actions of the
    others are removed, and weight gradients fill the gaps.

    A stage holds at most 2 min(P, M) chunk inputs. A chunk is half as large as a stage of 1F1B, so the peak of memory is the
    same. If F, I and W take the same time t and M >= P, the bubble is (P - 1) t, the time until the last stage starts.
    """
    patterns = [number_microbatches(_zbv_pattern(stage, num_stages, num_microbatches)) for stage in range(num_stages)]
    lists = [[action for action in actions if action.micro < num_microbatches] for actions in patterns]
    return insert_weight_gradients(lists, v_placement(num_stages), max_inputs=2 * num_stages)


def _zbv_pattern(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Symbol]:
    """Yields the symbols of stage `stage` of ZB-V, without weight gradients, for at least `num_microbatches`."""
    num_later = num_stages - 1 - stage
    yield from [F0] * (2 * num_later + 1)  # until the first sample returns to this stage
    yield from [F1, F0] * stage  # until the last stage has a gradient for this stage
    yield from [F1, I1] * (num_later + 1)  # until that gradient returns through chunk 0
    yield from [F0, I0, F1, I1] * (num_microbatches - num_stages - num_later)  # the steady state
    yield from [I0, F1, I1] * num_later  # after the last F0
    yield from [I0, I1] * stage  # after the last F1
    yield from [I0] * (num_later + 1)


def build(
    config: plugin.GPipeConfig
    | plugin.OneFOneBConfig
    | plugin.InterleavedConfig
    | plugin.ZeroBubbleH1Config
    | plugin.ZeroBubbleVConfig,
) -> Schedule:
    """Returns the schedule that the class of `config`, the plan's `[pipeline]` table, selects."""
    if isinstance(config, plugin.InterleavedConfig):
        return Schedule(interleaved, config.chunks)
    if isinstance(config, plugin.ZeroBubbleVConfig):
        return Schedule(zero_bubble_v, chunks=2, place=v_placement)
    if isinstance(config, plugin.ZeroBubbleH1Config):
        return Schedule(zero_bubble_h1)
    return Schedule(gpipe if isinstance(config, plugin.GPipeConfig) else one_f_one_b)


def build_csv(config: plugin.CsvConfig) -> Schedule:
    """Returns the schedule in `config.file`, a CSV file for one number of stages and one number of microbatches. Raises
    PlanError "schedule-file" if the file cannot be read or parsed. The schedule raises the same error for any other numbers.
    """
    try:
        text = config.file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _file_error(f"cannot be read: {error}", Place(str(config.file))) from error
    placement, lists = read_csv(text, str(config.file))
    num_microbatches = 1 + max(action.micro for actions in lists for action in actions)

    def place(num_stages: int, num_chunks: int) -> Placement:
        if num_stages != placement.stages:
            raise size_error(f"{placement.stages} stages", f"{num_stages}")
        return placement

    def generate(num_stages: int, num_chunks: int, plan_microbatches: int) -> list[list[Action]]:
        if (num_stages, plan_microbatches) != (placement.stages, num_microbatches):
            raise size_error(
                f"{placement.stages} stages and {num_microbatches} microbatches", f"{num_stages} and {plan_microbatches}"
            )
        return lists

    def size_error(file_size: str, other_size: str) -> PlanError:
        message = f"the schedule {config.file} is for {file_size}, not for {other_size}"
        return PlanError("schedule-file", message, path=("pipeline", "file"))

    return Schedule(generate, placement.chunks, place)


KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}
"""The type of action for each letter in a CSV file."""

ACTION_PATTERN = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
"""Matches the text of an action: the position, the letter of its type, and the microbatch."""

OVERLAP_PATTERN = re.compile(r"\((.*)\)OVERLAP_F_B")
"""Matches a cell of a CSV file with actions that torch overlaps. Group 1: the actions, separated by `;`."""

CsvAction = tuple[int, Kind, int]
"""The position, type and microbatch of an action."""


def read_csv(text: str, name: str) -> tuple[Placement, list[list[Action]]]:
    """Parses the CSV format of torch.distributed.pipelining, and returns the placement and the lists of compute actions.

    name: the file name for error messages. The format has a row per stage and a cell per action:

        0F0,0F1,,1F0,1I0,1W0,...        `1I0`: input gradients of model part 1 (counted along the model), microbatch 0

    F is a forward and B a full backward. I and W are the two parts of a split backward. Empty cells are skipped. The actions of
    `(0F4;1B2)OVERLAP_F_B` run one after another. Raises PlanError "schedule-file", with line and column, for other actions such
    as sends and receives, which `lower` adds. `lower` also checks that the lists form a valid step.
    """
    rows = [_parse_row(line, name, number) for number, line in enumerate(text.splitlines(), start=1)]
    if not any(rows):
        raise _file_error("has no actions", Place(name))
    placement = _build_placement([{position for position, _, _ in row} for row in rows], Place(name))
    chunks = [{placement.position(stage, chunk): chunk for chunk in range(placement.chunks)} for stage in range(len(rows))]
    lists = [
        [Action(kind, chunks[stage][position], microbatch) for position, kind, microbatch in row]
        for stage, row in enumerate(rows)
    ]
    return placement, lists


def _parse_row(line: str, name: str, line_number: int) -> list[CsvAction]:
    """Returns the actions of `line`, which is line `line_number` of the file `name`. Overlapped actions are listed in order."""
    actions: list[CsvAction] = []
    start = 0
    for cell in line.split(","):
        overlap = OVERLAP_PATTERN.fullmatch(cell.strip())
        for text in overlap[1].split(";") if overlap else [cell]:
            if text := text.strip():
                match = ACTION_PATTERN.fullmatch(text)
                if match is None:
                    location = Place(name, line_number, line.index(text, start) + 1)
                    fault = f"contains `{text}`, which must be a compute action such as `0F0`, `1B3`, `1I3` or `1W3`"
                    raise _file_error(fault, location)
                actions.append((int(match[1]), KINDS[match[2]], int(match[3])))
        start += len(cell) + 1
    return actions


def _build_placement(positions_per_rank: Sequence[set[int]], location: Place) -> Placement:
    """Returns the placement in which rank i holds the positions `positions_per_rank[i]`. Raises PlanError "schedule-file"
    unless all ranks hold the same number of positions, and each position is on exactly one rank.
    """
    holders = {position: rank for rank, positions in enumerate(positions_per_rank) for position in positions}
    positions_text = "; ".join(f"rank {rank}: {sorted(positions)}" for rank, positions in enumerate(positions_per_rank[:8]))
    if len(holders) != sum(map(len, positions_per_rank)) or sorted(holders) != list(range(len(holders))):
        raise _file_error(
            f"must place each chunk of the model, numbered from 0, on exactly one rank ({positions_text})", location
        )
    if len({len(positions) for positions in positions_per_rank}) > 1:
        raise _file_error(f"must place the same number of chunks on every rank ({positions_text})", location)
    return Placement(tuple(holders[position] for position in range(len(holders))))


def _file_error(fault: str, location: Place) -> PlanError:
    return PlanError("schedule-file", f"the schedule {location} {fault}", path=("pipeline", "file"))
