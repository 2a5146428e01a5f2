"""What the sources say in their errors: each call that makes one, by whatever function, with the texts that it may have.

Sources are parsed and not run. A value that is only known then is a gap in the text, by its name where it has one.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

Names = dict[str, list[ast.expr]]
"""What is assigned to each name."""

OTHER_CALLS = {
    "Problem": ("path", "message", "hint", "code"),
    "diagnostic": ("code", "message", "path", "hint"),
    "_add_problem": ("code", "message", "path", "hint"),
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


class Given(ast.Constant):
    """What a call gives for a parameter: the texts that this may be. It stands before all that the function assigns."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(value="")
        self.texts, self.lineno = texts, 0


@dataclass(frozen=True, eq=False)
class Maker:
    """A function that makes an error of what it is called with. names: in its scope."""

    parameters: tuple[str, ...]
    error: ast.Call
    names: Names


@dataclass(frozen=True)
class Source:
    """A module. names: its constants, and those that it imports. makers: of errors, by name, its own and imported ones.
    others: the modules that it imports names from, of those that are looked at.
    """

    tree: ast.Module
    names: Names
    makers: dict[str, list[Maker]] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def said_in(files: Iterable[Path], kinds: Iterable[str]) -> Iterator[Said]:
    """Yields what `files` say, in any order. kinds: names of the classes of errors that others are made from."""
    sources = {module(file): Source(tree := ast.parse(file.read_text("utf-8")), assigned(tree.body)) for file in files}
    known = classes([source.tree for source in sources.values()], kinds)
    for name in sources:
        sources[name].makers.update(makers(sources[name], known))
    sources = {name: with_imports(source, sources) for name, source in sources.items()}
    used = set()
    for call, names, source in every_call(sources.values()):
        for maker in source.makers.get(name_of(call), ()) if is_plain(call) else ():
            used.add(maker.error)
            yield from said(maker.error, known, maker.names | given(call, maker, names))
    for call, names, source in every_call(sources.values()):
        if call not in used:
            yield from said(call, known, names)
            yield from passed_on(call, known, names, [source, *(sources[other] for other in source.others)])


def module(file: Path) -> str:
    """Returns the name by which a file is imported."""
    return ".".join(file.with_suffix("").parts).rpartition(".src.")[2]


def with_imports(source: Source, sources: Mapping[str, Source]) -> Source:
    """Returns `source` with constants and makers that it imports from other `sources`."""
    found = [
        (node.module, alias.name, alias.asname or alias.name)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module in sources
        for alias in node.names
    ]
    names = {here: sources[there].names[name] for there, name, here in found if name in sources[there].names}
    made = {here: sources[there].makers[name] for there, name, here in found if name in sources[there].makers}
    others = tuple(dict.fromkeys(there for there, _, _ in found))
    return Source(source.tree, names | source.names, made | source.makers, others)


def every_call(sources: Iterable[Source]) -> Iterator[tuple[ast.Call, Names, Source]]:
    """Yields each call within a function, with what the names there are."""
    for source in sources:
        for function in functions(source.tree):
            nodes = list(ast.walk(function))
            names = source.names | assigned(nodes)
            yield from ((node, names, source) for node in nodes if isinstance(node, ast.Call))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def makers(source: Source, kinds: Mapping[str, str]) -> dict[str, list[Maker]]:
    """Returns by name the functions of `source` that make an error from a parameter; methods without `self`."""
    found: dict[str, list[Maker]] = defaultdict(list)
    for function in functions(source.tree):
        arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        parameters = tuple(arguments[1:] if arguments[:1] == ["self"] else arguments)
        named = {*parameters, *(one.arg for one in function.args.kwonlyargs)}
        for call in ast.walk(function):
            parts = parts_of(call, kinds) if isinstance(call, ast.Call) else None
            if parts is None or isinstance(parts["message"], ast.Subscript):  # the latter is `passed_on`
                continue
            within = [node for part in parts.values() for node in ast.walk(part)]
            if named & {node.id for node in within if isinstance(node, ast.Name)} and function.name not in OTHER_CALLS:
                names = source.names | assigned(list(ast.walk(function)))
                found[function.name].append(Maker(parameters, call, names))
    return found


def given(call: ast.Call, maker: Maker, names: Names) -> Names:
    """Returns what `call` gives for the texts that `maker` takes."""
    values = dict(zip(maker.parameters, call.args, strict=False))
    values |= {each.arg: each.value for each in call.keywords if each.arg}
    made = {name: texts(value, names) for name, value in values.items()}
    return {name: [*maker.names.get(name, []), Given(some)] for name, some in made.items() if any(map(without_gaps, some))}


def passed_on(call: ast.Call, kinds: Mapping[str, str], names: Names, sources: Sequence[Source]) -> Iterator[Said]:
    """Yields what an error says that takes its message from a dict, as ranks tell each other: that of each such dict."""
    parts = parts_of(call, kinds)
    if parts is None or not isinstance(parts["message"], ast.Subscript):
        return
    for source in sources:
        for function in functions(source.tree):
            nodes = list(ast.walk(function))
            for told in (node for node in nodes if isinstance(node, ast.Dict)):
                entries = {
                    key.value: value for key, value in zip(told.keys, told.values, strict=True) if isinstance(key, ast.Constant)
                }
                if {"message", "hint"} <= entries.keys():
                    scope = source.names | assigned(nodes)
                    for code in texts(parts["code"], names):
                        for message, remedy in together(texts(entries["message"], scope), texts(entries["hint"], scope)):
                            kind = kinds.get(name_of(call), "PlanError")
                            yield Said(kind, code, message, remedy if without_gaps(remedy) else "")


def name_of(call: ast.Call) -> str:
    """Returns the name of what is called: of a method, without its object."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def is_plain(call: ast.Call) -> bool:
    """Returns whether a function is called by its name, or a method of its own object: others' methods may share a name."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return isinstance(value, ast.Name) and (value is call.func or value.id == "self")


def without_gaps(text: str) -> str:
    return re.sub(r"\{[^}]*\}|…", "", text)


def classes(trees: Iterable[ast.Module], known: Iterable[str]) -> dict[str, str]:
    """Returns, by the name of each class of errors, which of `known` it is. A diagnostic by itself is of a plan."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {kind: kind for kind in known} | {"Diagnostic": "PlanError", "SleyError": "RunError"}
    while more := {name: kinds[base] for name, every in bases.items() if name not in kinds for base in every if base in kinds}:
        kinds |= {name: kind for name, kind in more.items() if name.endswith("Error")}
        if not any(name.endswith("Error") for name in more):
            break
    return kinds


def assigned(nodes: Sequence[ast.AST]) -> Names:
    """Returns what is assigned to each name by the statements among `nodes`."""
    values: Names = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values[target.id].append(node.value)
    return values


def said(call: ast.Call, kinds: Mapping[str, str], names: Names) -> Iterator[Said]:
    """Yields what a call that makes an error says, as far as `names` tell; nothing for another call."""
    parts = parts_of(call, kinds)
    if parts is None:
        return
    codes, messages = texts(parts["code"], names), texts(parts["message"], names)
    remedies = texts(parts["hint"], names) if "hint" in parts else [""]
    for code, message in together(codes, messages):
        for _, remedy in together(messages, remedies, of=message):
            if CODE.fullmatch(code):  # else it comes from elsewhere, where it is found too
                kind = kinds.get(name_of(call), "PlanError")
                yield Said(kind, code, message, remedy if without_gaps(remedy) else "")


def parts_of(call: ast.Call, kinds: Mapping[str, str]) -> dict[str, ast.expr] | None:
    """Returns code, message and hint of a call that makes an error; None for another call."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    kind = kinds.get(name) if isinstance(call.func, ast.Name) else None
    order = ("code", "message") if kind else OTHER_CALLS.get(name)
    if order is None or len(call.args) < order.index("message") + 1:
        return None
    parts = dict(zip(order, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
    return parts if "code" in parts else None


def together(firsts: list[str], seconds: list[str], of: str | None = None) -> list[tuple[str, str]]:
    """Returns which go together: by their places where there are as many of both, as branches choose all at once; else
    each with each. of: only pairs of this first one.
    """
    pairs = zip(firsts, seconds, strict=True) if len(firsts) == len(seconds) else product(firsts, seconds)
    return [pair for pair in pairs if of is None or pair[0] == of]


def texts(node: ast.expr, names: Names, depth: int = 0) -> list[str]:
    """Returns the texts that `node` may have, a gap in place of what is computed."""
    if isinstance(node, Given):
        return list(node.texts)
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else ""]
    if isinstance(node, ast.IfExp):
        return [text for branch in (node.body, node.orelse) for text in texts(branch, names, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left, names, depth) for right in texts(node.right, names, depth)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in product(*(piece(part, names) for part in node.values))]
    if isinstance(node, ast.Name) and depth < 3:
        before = [value for value in names.get(node.id, []) if value.lineno < node.lineno]
        if before:  # the nearest: a name may be used for one error after another
            return texts(max(before, key=lambda value: value.lineno), names, depth + 1)
    return [GAP]


def piece(part: ast.expr, names: Names) -> list[str]:
    """Returns the texts of a part of an f-string: a gap for a value, unless a call of the function has given it."""
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    value = part.value if isinstance(part, ast.FormattedValue) else part
    given = names.get(value.id, [])[-1:] if isinstance(value, ast.Name) else []
    return list(given[0].texts) if given and isinstance(given[0], Given) else [gap(part)]


def gap(part: ast.expr) -> str:
    """Returns what stands for a value: the name that the source has for it, where it is a word."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return f"{{{name.strip('_').lower()}}}" if len(name) > 2 else GAP
