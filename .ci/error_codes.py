"""Writes docs/errors.md: every error of Sley by its code, from the sources of all packages.

python .ci/error_codes.py > docs/errors.md
python .ci/error_codes.py --check           # exits 1 if the page is not what this would write
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from error_calls import ErrorEntry, find_errors, without_gaps

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
INTRODUCTION = """\
# Errors by code

<!-- Written by `python .ci/error_codes.py` from the sources; do not edit. -->

An error is printed as `error[code]: message`, with its position in the plan and a hint, and without a traceback. This page
lists the messages and hints of every code; {name} and … stand for values. If a machine or another rank fails,
`train-cli doctor RUN` prints the details ([when it fails](when-it-fails.md)).
"""
KINDS = {
    "PlanError": (
        "The plan",
        "Exit code 3. These errors are raised before anything runs, and `train-cli check` reports most of them.",
    ),
    "PluginError": ("Plugins", "Exit code 4. A package that the plan needs is missing, broken, or installed twice."),
    "UsageError": ("Commands and calls", "Exit code 2. The command line, or a call in your program, is wrong."),
    "RunError": ("The run", "Exit code 1. All ranks raise the same error, unless one of them has died."),
}


def main(arguments: Sequence[str]) -> int:
    files = [file for top in ("packages", "apps") for file in sorted((ROOT / top).glob("*/src/**/*.py"))]
    text = page(sorted(set(find_errors(files, KINDS))))
    if "--check" not in arguments:
        sys.stdout.write(text)
        return 0
    if PAGE.read_text("utf-8") == text:
        return 0
    sys.stderr.write("docs/errors.md differs from the sources; run: python .ci/error_codes.py > docs/errors.md\n")
    return 1


def page(errors: Sequence[ErrorEntry]) -> str:
    lines = [INTRODUCTION]
    for kind, (title, about) in KINDS.items():
        lines += [f"## {title}", "", about, "", "| Code | Message | Hint |", "|---|---|---|"]
        by_code: dict[str, list[ErrorEntry]] = defaultdict(list)
        for error in errors:
            if error.kind == kind:
                by_code[error.code].append(error)
        for code, entries in by_code.items():
            for number, error in enumerate(drop_uninformative(entries)):
                lines.append(f"| {'' if number else f'`{code}`'} | {cell(error.message)} | {cell(error.hint)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def drop_uninformative(errors: Sequence[ErrorEntry]) -> list[ErrorEntry]:
    """Returns the errors of one code without entries that have no text, and without a hint if the same message has one."""
    with_hint = {error.message for error in errors if error.hint}
    entries = [error for error in errors if error.hint or error.message not in with_hint]
    return [error for error in entries if any(map(str.isalpha, without_gaps(error.message)))] or entries[:1]


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
