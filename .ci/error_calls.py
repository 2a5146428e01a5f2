"""Finds the codes, messages and hints of all errors in the sources, including those that helper functions create.

Parses the sources, and does not run them. A value that only a run knows is a gap in the text, with the name of its variable.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

Names = dict[str, list[ast.expr]]
"""The values that are assigned to each name."""

PROBLEM_CALLS = {
    "Problem": ("path", "message", "hint", "code"),
    "diagnostic": ("code", "message", "path", "hint"),
    "_add_problem": ("code", "message", "path", "hint"),
}
"""The functions that report problems of a plan without raising an error, and the order of their arguments."""

GAP = "…"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, order=True)
class ErrorEntry:
    """An error. kind: its class. hint: its hint, or "" without one."""

    kind: str
    code: str
    message: str
    hint: str


class ArgumentTexts(ast.Constant):
    """The possible texts of a call's argument. Its line number is 0, so that assignments in the function replace it."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(value="")
        self.texts, self.lineno = texts, 0


@dataclass(frozen=True, eq=False)
class ErrorFactory:
    """A function that creates an error from its arguments. names: the names in its scope."""

    parameters: tuple[str, ...]
    error: ast.Call
    names: Names


@dataclass(frozen=True)
class Source:
    """A module. names: its own and imported constants. factories: its own and imported error factories by name. modules: the
    parsed modules from which it imports names.
    """

    tree: ast.Module
    names: Names
    factories: dict[str, list[ErrorFactory]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


def find_errors(files: Iterable[Path], kinds: Iterable[str]) -> Iterator[ErrorEntry]:
    """Yields the errors in `files`, in any order. kinds: the names of the base classes of errors."""
    sources = {module(file): Source(tree := ast.parse(file.read_text("utf-8")), assignments(tree.body)) for file in files}
    known = error_classes([source.tree for source in sources.values()], kinds)
    for name in sources:
        sources[name].factories.update(find_factories(sources[name], known))
    sources = {name: add_imports(source, sources) for name, source in sources.items()}
    used = set()
    for call, names, source in iterate_calls(sources.values()):
        for factory in source.factories.get(called_name(call), ()) if is_plain(call) else ():
            used.add(factory.error)
            yield from entries_of_call(factory.error, known, factory.names | argument_texts(call, factory, names))
    for call, names, source in iterate_calls(sources.values()):
        if call not in used:
            yield from entries_of_call(call, known, names)
            yield from entries_of_dicts(call, known, names, [source, *(sources[other] for other in source.modules)])


@cache
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """Returns all nodes in `node`, and `node` itself."""
    return tuple(ast.walk(node))


def module(file: Path) -> str:
    """Returns the name of a file's module."""
    return ".".join(file.with_suffix("").parts).rpartition(".src.")[2]


def add_imports(source: Source, sources: Mapping[str, Source]) -> Source:
    """Returns `source` with the constants and factories that it imports from other `sources`."""
    imports = [
        (node.module, alias.name, alias.asname or alias.name)
        for node in walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module in sources
        for alias in node.names
    ]
    names = {
        alias: sources[module_name].names[name] for module_name, name, alias in imports if name in sources[module_name].names
    }
    factories = {
        alias: sources[module_name].factories[name]
        for module_name, name, alias in imports
        if name in sources[module_name].factories
    }
    modules = tuple(dict.fromkeys(module_name for module_name, _, _ in imports))
    return Source(source.tree, names | source.names, factories | source.factories, modules)


def iterate_calls(sources: Iterable[Source]) -> Iterator[tuple[ast.Call, Names, Source]]:
    """Yields each call in a function, the names in its scope, and its module."""
    for source in sources:
        for function in functions(source.tree):
            nodes = walk(function)
            names = source.names | assignments(nodes)
            yield from ((node, names, source) for node in nodes if isinstance(node, ast.Call))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def find_factories(source: Source, kinds: Mapping[str, str]) -> dict[str, list[ErrorFactory]]:
    """Returns the functions of `source` that create an error from a parameter, by name; methods without `self`."""
    factories: dict[str, list[ErrorFactory]] = defaultdict(list)
    for function in functions(source.tree):
        arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        parameters = tuple(arguments[1:] if arguments[:1] == ["self"] else arguments)
        named = {*parameters, *(argument.arg for argument in function.args.kwonlyargs)}
        for call in walk(function):
            parts = error_parts(call, kinds) if isinstance(call, ast.Call) else None
            if parts is None or isinstance(parts["message"], ast.Subscript):  # the latter is `entries_of_dicts`
                continue
            within = [node for part in parts.values() for node in walk(part)]
            if named & {node.id for node in within if isinstance(node, ast.Name)} and function.name not in PROBLEM_CALLS:
                names = source.names | assignments(walk(function))
                factories[function.name].append(ErrorFactory(parameters, call, names))
    return factories


def argument_texts(call: ast.Call, factory: ErrorFactory, names: Names) -> Names:
    """Returns the texts of the arguments of `call` by the parameters of `factory`."""
    values = dict(zip(factory.parameters, call.args, strict=False))
    values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    texts_by_name = {name: texts(value, names) for name, value in values.items()}
    return {
        name: [*factory.names.get(name, []), ArgumentTexts(values)]
        for name, values in texts_by_name.items()
        if any(map(without_gaps, values))
    }


def entries_of_dicts(call: ast.Call, kinds: Mapping[str, str], names: Names, sources: Sequence[Source]) -> Iterator[ErrorEntry]:
    """Yields the errors whose message comes from a dict that ranks exchange, one for each such dict."""
    parts = error_parts(call, kinds)
    if parts is None or not isinstance(parts["message"], ast.Subscript):
        return
    for source in sources:
        for function in functions(source.tree):
            nodes = walk(function)
            for dictionary in (node for node in nodes if isinstance(node, ast.Dict)):
                entries = {
                    key.value: value
                    for key, value in zip(dictionary.keys, dictionary.values, strict=True)
                    if isinstance(key, ast.Constant)
                }
                if {"message", "hint"} <= entries.keys():
                    scope = source.names | assignments(nodes)
                    for code in texts(parts["code"], names):
                        for message, hint in pair_up(texts(entries["message"], scope), texts(entries["hint"], scope)):
                            kind = kinds.get(called_name(call), "PlanError")
                            yield ErrorEntry(kind, code, message, hint if without_gaps(hint) else "")


def called_name(call: ast.Call) -> str:
    """Returns the name of the called function or method."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def is_plain(call: ast.Call) -> bool:
    """Returns whether a call names a function or a method of `self`, since methods of other objects may share a name."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return isinstance(value, ast.Name) and (value is call.func or value.id == "self")


def without_gaps(text: str) -> str:
    return re.sub(r"\{[^}]*\}|…", "", text)


def error_classes(trees: Iterable[ast.Module], known: Iterable[str]) -> dict[str, str]:
    """Returns the base class in `known` of each error class. A `Diagnostic` counts as a PlanError."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {kind: kind for kind in known} | {"Diagnostic": "PlanError", "SleyError": "RunError"}
    while more := {name: kinds[base] for name, every in bases.items() if name not in kinds for base in every if base in kinds}:
        kinds |= {name: kind for name, kind in more.items() if name.endswith("Error")}
        if not any(name.endswith("Error") for name in more):
            break
    return kinds


def assignments(nodes: Sequence[ast.AST]) -> Names:
    """Returns the values that the statements among `nodes` assign to each name."""
    values: Names = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values[target.id].append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            earlier = ast.Name(node.target.id, lineno=node.lineno)
            values[node.target.id].append(ast.BinOp(earlier, node.op, node.value, lineno=node.lineno))
    return values


def entries_of_call(call: ast.Call, kinds: Mapping[str, str], names: Names) -> Iterator[ErrorEntry]:
    """Yields the entries of a call that creates an error, with the texts that `names` determine; nothing for another call."""
    parts = error_parts(call, kinds)
    if parts is None:
        return
    codes, messages = texts(parts["code"], names), texts(parts["message"], names)
    hints = texts(parts["hint"], names) if "hint" in parts else [""]
    for code, message in pair_up(codes, messages):
        for _, hint in pair_up(messages, hints, of=message):
            if CODE.fullmatch(code):  # else another call determines the code
                kind = kinds.get(called_name(call), "PlanError")
                yield ErrorEntry(kind, code, message, hint if without_gaps(hint) else "")


def error_parts(call: ast.Call, kinds: Mapping[str, str]) -> dict[str, ast.expr] | None:
    """Returns the code, message and hint of a call that creates an error; None for another call."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    kind = kinds.get(name) if isinstance(call.func, ast.Name) else None
    order = ("code", "message") if kind else PROBLEM_CALLS.get(name)
    if order is None or len(call.args) < order.index("message") + 1:
        return None
    parts = dict(zip(order, call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return parts if "code" in parts else None


def pair_up(firsts: list[str], seconds: list[str], of: str | None = None) -> list[tuple[str, str]]:
    """Returns the pairs of both lists by index if the lists have the same length, and else all pairs. of: the first text of the
    pairs to return, or None for all.
    """
    pairs = zip(firsts, seconds, strict=True) if len(firsts) == len(seconds) else product(firsts, seconds)
    return [pair for pair in pairs if of is None or pair[0] == of]


def texts(node: ast.expr, names: Names, depth: int = 0) -> list[str]:
    """Returns the possible texts of `node`, with gaps for computed values."""
    if isinstance(node, ArgumentTexts):
        return list(node.texts)
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else ""]
    if isinstance(node, ast.IfExp):
        return [text for branch in (node.body, node.orelse) for text in texts(branch, names, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left, names, depth) for right in texts(node.right, names, depth)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in product(*(piece(part, names) for part in node.values))]
    if isinstance(node, ast.Call) and called_name(node) == "install_hint":
        package, *extra = (texts(argument, names, depth)[0] for argument in node.args)
        return [f"install sley-{package}{f'[{extra[0]}]' if extra else ''}"]
    if isinstance(node, ast.Name) and depth < 3:
        before = [value for value in names.get(node.id, []) if value.lineno < node.lineno]
        if before:  # the nearest: a name may be used for one error after another
            return texts(max(before, key=lambda value: value.lineno), names, depth + 1)
    return [GAP]


def piece(part: ast.expr, names: Names) -> list[str]:
    """Returns the possible texts of a part of an f-string: a gap for a value, unless an argument determines it."""
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    value = part.value if isinstance(part, ast.FormattedValue) else part
    given = names.get(value.id, [])[-1:] if isinstance(value, ast.Name) else []
    return list(given[0].texts) if given and isinstance(given[0], ArgumentTexts) else [gap(part)]


def gap(part: ast.expr) -> str:
    """Returns the gap for a value: the name of its variable, if that is a word."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return f"{{{name.strip('_').lower()}}}" if len(name) > 2 else GAP
