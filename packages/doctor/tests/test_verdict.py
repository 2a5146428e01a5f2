"""What the reports of ranks mean together, without processes: every kind of failure, and which of several is the cause."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from sley_doctor.fault_report import AttemptReports, ExchangeRecord, FaultReport, LaunchReport, WaitRecord
from sley_doctor.verdict import Verdict, describe_report, find_verdict

FOUR = (0, 1, 2, 3)


def exchange(number: int, label: str, ranks: tuple[int, ...] = (0, 1), axis: str = "stage", **changes: Any) -> ExchangeRecord:
    fields = {"operation": "all-reduce", "queue": f"{axis} main", "num_bytes": 64} | changes
    return ExchangeRecord(label=label, group=f"{axis}{list(ranks)}", ranks=ranks, number=number, **fields)


def report(rank: int, *exchanges: ExchangeRecord, wait: ExchangeRecord | None = None, **changes: Any) -> FaultReport:
    queues: dict[str, tuple[ExchangeRecord, ...]] = {}
    for item in exchanges:
        queues[item.queue] = (*queues.get(item.queue, ()), item)
    fields = {"world": 2, "kind": "error", "time": 1.0, "code": "collective-failed", "message": "it failed"} | changes
    wait_record = None if wait is None else WaitRecord(wait, 4.0, "late")
    return FaultReport(rank=rank, wait=wait_record, exchanges=queues, step=3, pending="B0.1", layer="blocks.1", **fields)


def verdict_of(*reports: FaultReport, launch: LaunchReport | None = None) -> Verdict:
    return find_verdict(AttemptReports(0, reports, launch))


A, B, C = exchange(1, "a"), exchange(2, "b"), exchange(3, "c")
TOTAL = exchange(1, "loss", axis="all")


def test_two_ranks_that_differ_are_not_told_apart() -> None:
    """One may have left it out, or the other may have made it in addition."""
    verdict = verdict_of(report(0, A, B, C, wait=B), report(1, A, exchange(2, "c"), wait=exchange(2, "c")))
    assert (verdict.kind, verdict.ranks) == ("left out", ())
    assert [item.label for item in verdict.exchanges] == ["b", "c"]
    assert "as number 2 of one queue" in verdict.cause
    assert verdict.cause.endswith(
        "one rank has skipped the all-reduce of b over stage[0, 1], or the other rank makes it once too often"
    )


@pytest.mark.parametrize(
    ("odd", "kind", "label"),
    [
        ([A, exchange(2, "c")], "left out", "b"),
        ([A, exchange(2, "x"), exchange(3, "b")], "too many", "x"),
        ([A, exchange(2, "b", num_bytes=32)], "size", "b"),
        ([A, exchange(2, "x"), exchange(3, "y")], "other", "b"),
    ],
)
def test_among_four_the_odd_one_is_named(odd: list[ExchangeRecord], kind: str, label: str) -> None:
    def widen(item: ExchangeRecord) -> ExchangeRecord:
        return replace(item, ranks=FOUR, group="stage[0, 1, 2, 3]")

    usual = [widen(item) for item in (A, B, C)]
    reports = [report(rank, *usual, wait=usual[-1]) for rank in (0, 1, 3)]
    verdict = verdict_of(*reports, report(2, *map(widen, odd), wait=widen(odd[-1])))
    assert (verdict.kind, verdict.ranks, verdict.exchanges[0].label) == (kind, (2,), label)


def test_ranks_that_wait_in_different_queues() -> None:
    """Rank 1 has gone on to the sum that ends the step: it never made the exchange in which rank 0 waits."""
    verdict = verdict_of(report(0, A, B, wait=B), report(1, A, TOTAL, wait=TOTAL))
    assert (verdict.kind, verdict.ranks) == ("not started", ())
    assert [item.label for item in verdict.exchanges] == ["b", "loss"]


@pytest.mark.parametrize(("has_been", "kind", "label"), [(True, "left out", "b"), (False, "too many", "loss")])
def test_a_rank_that_three_wait_for_is_named(has_been: bool, kind: str, label: str) -> None:
    """It has left out what they wait for if what it waits in is something that all make, as in the step before."""
    here = [replace(item, ranks=FOUR, group="stage[0, 1, 2, 3]") for item in (A, B)]
    before, total = (replace(TOTAL, ranks=FOUR, number=number) for number in (1, 2))
    earlier = [before] if has_been else []
    others = [report(rank, *earlier, *here, wait=here[1]) for rank in (0, 2, 3)]
    verdict = verdict_of(*others, report(1, *earlier, here[0], total, wait=total))
    assert (verdict.kind, verdict.ranks, verdict.exchanges[0].label) == (kind, (1,), label)


def message(number: int, micro: int, operation: str, **changes: Any) -> ExchangeRecord:
    verb, stages = ("sends to", "0 {} stage 1") if operation == "send" else ("receives from", "1 {} stage 0")
    label = f"what stage {stages.format(verb)}, the output for microbatch {micro} (forward, chunk 0)"
    return exchange(number, label, axis="pp", operation=operation, queue="pp up 0>1", **changes)


def test_both_ends_of_a_message_are_one() -> None:
    """Their words differ; microbatch, flow and bytes do not."""
    sent = [message(number, number, "send", peer=1) for number in (1, 2)]
    taken = [message(number, number, "receive", peer=0) for number in (1, 2)]
    assert verdict_of(report(0, *sent), report(1, *taken, wait=taken[1])).kind == "said"
    skipped = message(2, 3, "send", peer=1)
    verdict = verdict_of(report(0, sent[0], skipped), report(1, *taken, wait=taken[1]))
    assert (verdict.kind, verdict.ranks) == ("other", ())
    short = message(2, 2, "send", peer=1, num_bytes=32)
    verdict = verdict_of(report(0, sent[0], short), report(1, *taken, wait=taken[1]))
    assert (verdict.kind, verdict.ranks) == ("size", ())
    assert all(size in verdict.cause for size in ("has 64 bytes", "has 32"))


def test_who_raised_is_the_cause_of_all_else() -> None:
    raised = report(1, A, code="own-code", message="ValueError:\nno", hint="mend", time=9.0)
    verdict = verdict_of(report(0, A, B, wait=B), raised)
    cause = "rank 1 failed: ValueError: no"
    assert (verdict.kind, verdict.ranks, verdict.cause, verdict.remedy) == ("error", (1,), cause, "mend")
    assert (verdict.step, verdict.action, verdict.layer) == (3, "B0.1", "blocks.1")


def test_what_all_ranks_raise_is_nobodys() -> None:
    verdict = verdict_of(*(report(rank, code="not-finite", message="loss nan") for rank in (0, 1)))
    assert verdict.cause == "all ranks failed: loss nan"


@pytest.mark.parametrize(("code", "words"), [(-9, "was killed by SIGKILL"), (7, "exited with code 7")])
def test_a_rank_that_died_is_told_by_those_that_waited(code: int, words: str) -> None:
    verdict = verdict_of(report(0, A, B, wait=B), launch=LaunchReport(2, {0: 1, 1: code}, {}, 1))
    assert (verdict.kind, verdict.ranks, [item.label for item in verdict.exchanges]) == ("killed", (1,), ["b"])
    assert verdict.cause.startswith(f"rank 1 {words}")
    assert verdict.cause.endswith("rank 0 waited for it in the all-reduce of b over stage[0, 1]")


def test_a_rank_that_native_code_ended_comes_after_one_that_was_killed() -> None:
    verdict = verdict_of(launch=LaunchReport(3, {0: -signal.SIGABRT, 1: 143, 2: -9}, {}, 0))
    assert verdict.ranks == (2,)


def test_a_stopped_rank_and_a_busy_one() -> None:
    silent = LaunchReport(2, {0: 1, 1: -9}, {1: "it is stopped, for example by SIGSTOP"}, 0)
    verdict = verdict_of(report(0, A, wait=A), launch=silent)
    assert (verdict.kind, verdict.ranks) == ("stopped", (1,))
    assert verdict.cause.startswith("rank 1 did not respond: it is stopped, for example by SIGSTOP; rank 0 waited for it")
    verdict = verdict_of(report(0, A, wait=A), report(1, kind="stuck", code="rank-late", message="it was at own.py:3"))
    assert (verdict.kind, verdict.ranks, verdict.layer) == ("busy", (1,), "blocks.1")


def test_ranks_that_the_launcher_ended_are_not_to_blame() -> None:
    verdict = verdict_of(report(0, A, wait=A), launch=LaunchReport(2, {0: 1, 1: -signal.SIGTERM}, {}, 0))
    assert verdict.kind == "missing"
    assert verdict.cause.startswith("rank 1 left no report")


def test_nothing_is_made_up() -> None:
    assert verdict_of().kind == "unknown"
    verdict = verdict_of(report(0, A, wait=A, message="connection closed"), report(1, A, wait=A))
    assert (verdict.kind, verdict.ranks, verdict.cause) == ("said", (), "connection closed")


def test_a_report_is_one_line() -> None:
    line = describe_report(report(0, A, wait=A, stage=1, message="x" * 500))
    assert line.startswith("rank 0 (stage 1): step 3, in the backward of chunk 0 on microbatch 1 (B0.1), last layer called: ")
    assert "waited 4.0 s in the all-reduce of a over stage[0, 1] (number 1 of `stage main`, 64 bytes)" in line
    assert line.endswith("...")


def crossing(operation: str, number: int, queue: str, peer: int, label: str) -> ExchangeRecord:
    return exchange(number, f"what stage {label}, chunk 0)", (0, 2, 4), "pp", operation=operation, queue=queue, peer=peer)


def test_who_waits_for_ranks_that_wait_for_each_other_only_follows() -> None:
    """Three stages of two replicas. Rank 2 has left out the step's last message; rank 0 waits for it, and rank 1 for rank 0."""
    last = crossing("send", 6, "pp up 1>2", 4, "1 sends to stage 2, the output for microbatch 2 (forward")
    missing = crossing("receive", 7, "pp up 1>2", 2, "2 receives from stage 1, the output for microbatch 3 (forward")
    middle = crossing("receive", 5, "pp down 2>1", 4, "1 receives from stage 2, the gradient for microbatch 3 (backward")
    first = crossing("receive", 5, "pp down 1>0", 2, "0 receives from stage 1, the gradient for microbatch 3 (backward")
    bucket = exchange(1, "the bucket of embed.weight")
    waits = [report(rank, item, wait=item) for rank, item in ((0, first), (1, bucket), (4, missing))]
    verdict = verdict_of(*waits, report(2, last, middle, wait=middle))
    assert {item.label for item in verdict.exchanges} == {missing.label, middle.label}
    assert verdict.ranks == (), verdict
