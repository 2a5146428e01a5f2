"""What the pages of the documentation show, to be tried: plans, and the commands of README.

In README a block ```sh is commands, typed in the order of the page; one marked ```sh alternative is another way to do what
stands before it. A block ```toml is a plan, saved as plan.toml; a part of a plan takes the place of the tables of the same
names in the last whole one.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """A line for a shell."""

    command: str


class Plan(NamedTuple):
    """What plan.toml has from now on."""

    text: str


def steps(page: str) -> Iterator[Command | Plan]:
    """What somebody does who follows `page`, in its order."""
    assert not re.search(r"^ {4}\S", page, re.MULTILINE), "an indented block does not say what it is"
    plan = ""
    for language, more, text in BLOCK.findall(page):
        if language == "sh" and not more:
            yield from map(Command, text.splitlines())
        elif language == "toml":
            tables = tomllib.loads(text)
            plan = text if "plan" in tables else plan
            yield Plan(text if "plan" in tables else without(tables, plan) + text)
        else:
            assert (language, more) in (("text", ""), ("sh", " alternative")), f"a block {language}{more}"


def check_answer(output: str) -> None:
    """Fails unless an answer of `train-cli chat`, the last line of its output, has the form of a docstring: a sentence, which
    an end token ends.
    """
    answer = output.rstrip().splitlines()[-1]
    assert re.fullmatch(r"[A-Z][^<>|]{9,}[.]", answer), f"this is no sentence:\n{output}"


def write_plans(root: Path, base: Path, folder: Path) -> Iterator[Path]:
    """Write each ```toml block of the documentation as a plan of its own; the name says where it stands.

    A block that is a part of a plan replaces the tables of the same names in `base`. A package manifest is no plan.
    """
    places = ("*.md", "docs/**/*.md", "packages/*/*.md", "apps/*/*.md", "examples/**/*.md")
    for page in sorted({page for place in places for page in root.glob(place)}):
        text = page.read_text("utf-8")
        for block in re.finditer(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            tables = tomllib.loads(block[1])
            if {"project", "build-system"} & tables.keys():
                continue
            line = text.count("\n", 0, block.start()) + 2
            name = f"{page.relative_to(root).as_posix().replace('/', '-')}-line-{line}.toml"
            plan = folder / name
            whole = "plan" in tables
            plan.write_text(block[1] if whole else without(tables, base.read_text("utf-8")) + block[1], "utf-8")
            yield plan


def without(tables: dict[str, object], plan: str) -> str:
    """The text of `plan` without the tables that `tables` has."""
    preamble, *parts = re.split(r"^(?=\[)", plan, flags=re.MULTILINE)
    names = [part.lstrip("[").split("]")[0].split(".")[0] for part in parts]
    return preamble + "".join(part for part, name in zip(parts, names, strict=True) if name not in tables) + "\n"
