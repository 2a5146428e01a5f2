"""docs/errors.md: every error that Sley tells by a code, read from the sources of all packages.

python .ci/error_codes.py > docs/errors.md
python .ci/error_codes.py --check           # exits 1 if the page is not what this would write
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
INTRODUCTION = """\
# Errors by code

<!-- Written by `python .ci/error_codes.py` from the sources; do not edit. -->

What goes wrong is told as `error[code]: what is wrong`, with its place in the plan and a hint, and without a
traceback. This page has every code, with what is said and what to do; {name} and … stand for what is only known then.
After a fault of the machine, or of another rank, `train-cli doctor RUN` says more
([when-it-breaks.md](when-it-breaks.md)).
"""
KINDS = {
    "PlanError": ("The plan", "Exit code 3. Found before anything runs, most of them by `train-cli check`."),
    "PluginError": ("Plugins", "Exit code 4. A package that the plan needs is missing, broken, or not the only one."),
    "UsageError": ("Commands and calls", "Exit code 2. Of the command line, or of a program that uses a run."),
    "RunError": ("The run", "Exit code 1. All ranks end alike, unless one has died."),
}
OTHER_CALLS = {
    "Problem": ("path", "message", "hint", "code"),
    "diagnostic": ("code", "message", "path", "hint"),
    "_problem": ("code", "message", "path", "hint"),
}
"""What finds mistakes of a plan without raising them, and the order of its arguments."""

GAP = "…"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, order=True)
class Said:
    """One place that tells an error. kind: the error's class. remedy: its hint, or nothing."""

    kind: str
    code: str
    message: str
    remedy: str


def main(arguments: Sequence[str]) -> int:
    text = page(sorted(set(found())))
    if "--check" not in arguments:
        sys.stdout.write(text)
        return 0
    if PAGE.read_text("utf-8") == text:
        return 0
    sys.stderr.write("docs/errors.md lacks what the sources say: python .ci/error_codes.py > docs/errors.md\n")
    return 1


def page(errors: Sequence[Said]) -> str:
    lines = [INTRODUCTION]
    for kind, (title, about) in KINDS.items():
        lines += [f"## {title}", "", about, "", "| Code | What is said | What to do |", "|---|---|---|"]
        by_code: dict[str, list[Said]] = defaultdict(list)
        for error in errors:
            if error.kind == kind:
                by_code[error.code].append(error)
        for code, every in by_code.items():
            for number, error in enumerate(worth_reading(every)):
                lines.append(f"| {'' if number else f'`{code}`'} | {cell(error.message)} | {cell(error.remedy)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def worth_reading(errors: Sequence[Said]) -> list[Said]:
    """Returns errors of one code without those that say less than another: nothing of their own, or no remedy."""
    with_remedy = {error.message for error in errors if error.remedy}
    told = [error for error in errors if error.remedy or error.message not in with_remedy]
    return [error for error in told if any(map(str.isalpha, without_gaps(error.message)))] or told[:1]


def without_gaps(text: str) -> str:
    return re.sub(r"\{[^}]*\}|…", "", text)


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def found() -> Iterator[Said]:
    """Yields what the sources of all packages say, in any order."""
    files = [file for top in ("packages", "apps") for file in sorted((ROOT / top).glob("*/src/**/*.py"))]
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    kinds = classes(trees)
    for tree in trees:
        constants = assigned(tree.body)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = constants | assigned(list(ast.walk(function)))
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        yield from said(call, kinds, names)


def classes(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Returns, by the name of each class of errors, which of `KINDS` it is. A diagnostic by itself is of a plan."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {kind: kind for kind in KINDS} | {"Diagnostic": "PlanError", "SleyError": "RunError"}
    while more := {
        name: kinds[base] for name, every in bases.items() if name not in kinds for base in every if base in kinds
    }:
        kinds |= {name: kind for name, kind in more.items() if name.endswith("Error")}
        if not any(name.endswith("Error") for name in more):
            break
    return kinds


def assigned(nodes: Sequence[ast.AST]) -> dict[str, list[ast.expr]]:
    """Returns what is assigned to each name by the statements among `nodes`."""
    values: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values[target.id].append(node.value)
    return values


def said(call: ast.Call, kinds: dict[str, str], names: dict[str, list[ast.expr]]) -> Iterator[Said]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    kind = kinds.get(name) if isinstance(call.func, ast.Name) else None
    order = ("code", "message") if kind else OTHER_CALLS.get(name)
    if order is None or len(call.args) < order.index("message") + 1:
        return
    parts = dict(zip(order, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
    if "code" not in parts:
        return
    codes, messages = texts(parts["code"], names), texts(parts["message"], names)
    remedies = texts(parts["hint"], names) if "hint" in parts else [""]
    for code, message in together(codes, messages):
        for _, remedy in together(messages, remedies, of=message):
            if CODE.fullmatch(code):  # else it comes from elsewhere, where it is found too
                yield Said(kind or "PlanError", code, message, remedy if without_gaps(remedy) else "")


def together(firsts: list[str], seconds: list[str], of: str | None = None) -> list[tuple[str, str]]:
    """Returns which go together: by their places where there are as many of both, as branches choose all at once; else
    each with each. of: only pairs of this first one.
    """
    pairs = zip(firsts, seconds, strict=True) if len(firsts) == len(seconds) else product(firsts, seconds)
    return [pair for pair in pairs if of is None or pair[0] == of]


def texts(node: ast.expr, names: dict[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """Returns the texts that `node` may have, a gap in place of what is computed."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else ""]
    if isinstance(node, ast.IfExp):
        return [text for branch in (node.body, node.orelse) for text in texts(branch, names, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left, names, depth) for right in texts(node.right, names, depth)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else gap(part) for part in node.values)]
    if isinstance(node, ast.Name) and depth < 3:
        before = [value for value in names.get(node.id, []) if value.lineno < node.lineno]
        if before:  # the nearest: a name may be used for one error after another
            return texts(max(before, key=lambda value: value.lineno), names, depth + 1)
    return [GAP]


def gap(part: ast.expr) -> str:
    """Returns what stands for a value: the name that the source has for it, where it is a word."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return f"{{{name.strip('_').lower()}}}" if len(name) > 2 else GAP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
