"""Which package may import which, and what must stay free of torch: the configuration of import-linter."""

import json
from collections.abc import Iterator

from manifests import PACKAGES, ROOT


def import_rules() -> Iterator[str]:
    """The configuration of import-linter: which package may import which, and what must stay free of torch."""
    modules = [package.module for package in PACKAGES]
    plugins = [package.module for package in PACKAGES if package.is_plugin]
    tools = [package.module for package in PACKAGES if package.is_tool]
    apps = [package.module for package in PACKAGES if package.folder.startswith("apps/")]
    yield "[tool.importlinter]"
    yield f"root_packages = {modules}"
    yield "include_external_packages = true"
    yield "exclude_type_checking_imports = true"

    def contract(name: str, kind: str, **options: list[str] | bool) -> Iterator[str]:
        yield from ("[[tool.importlinter.contracts]]", f'name = "{name}"', f'type = "{kind}"')
        yield from (f"{key} = {json.dumps(value)}" for key, value in options.items())

    yield from contract("no plugin imports a sibling", "independence", modules=plugins)
    yield from contract(
        "core imports no other package", "forbidden", source_modules=["sley_core"], forbidden_modules=modules[1:]
    )
    yield from contract("a plugin imports no tool", "forbidden", source_modules=plugins, forbidden_modules=tools)
    yield from contract("a tool imports no plugin", "forbidden", source_modules=tools, forbidden_modules=plugins)
    others = [module for module in tools if module not in (*apps, "sley_trainer")]
    yield from contract(
        "the trainer imports only core",
        "forbidden",
        source_modules=["sley_trainer"],
        forbidden_modules=[module for module in modules if module not in ("sley_core", "sley_trainer")],
    )
    yield from contract(
        "the app imports no tool but the trainer",  # but `verify` does, and says what to install where the test kit is missing
        "forbidden",
        source_modules=apps,
        forbidden_modules=others,
        ignore_imports=["train_cli.commands.run -> sley_testing.**"],
    )
    yield from contract(
        "the test kit imports no other tool than the trainer",
        "forbidden",
        source_modules=["sley_testing"],
        forbidden_modules=[module for module in tools if module not in ("sley_testing", "sley_trainer")],
    )
    yield from contract("estimate and doctor do without each other", "independence", modules=["sley_estimate", "sley_doctor"])
    yield from contract(
        "a plugin imports what core makes public",
        "forbidden",
        source_modules=plugins,
        forbidden_modules=sorted(internal_modules()),
        allow_indirect_imports=True,
    )
    yield from contract(
        "plans and plugins are known without torch",
        "forbidden",
        source_modules=sorted(torch_free_modules()),
        forbidden_modules=["torch"],
    )


PUBLIC = {"api", "errors", "hookspecs", "protocols", "records"}
"""Of core, what a plugin may import: docs/api.md."""


def internal_modules() -> Iterator[str]:
    """The modules and packages right below `sley_core` that a plugin does not import."""
    for path in (ROOT / "packages/core/src/sley_core").iterdir():
        if not path.stem.startswith("__") and path.stem not in PUBLIC and (path.suffix == ".py" or path.is_dir()):
            yield f"sley_core.{path.stem}"


def torch_free_modules() -> Iterator[str]:
    """What `train-cli check` and `train-cli plugins` may import: a second and a half is too long for a help page."""
    of_core = {"errors", "table", "topology", "records", "hookspecs", "protocols", "plan", "actions"}
    for package in PACKAGES:
        for path in (ROOT / package.source).rglob("*.py"):
            name = path.relative_to(ROOT / package.source).with_suffix("").as_posix().replace("/", ".")
            first, *rest = name.removesuffix(".__init__").split(".")
            is_table_or_hooks = rest[-1:] in (["config"], ["plugin"]) and first != "sley_testing"
            if is_table_or_hooks or name in ("sley_core.api.plan", "sley_core.api.actions"):
                yield name
            elif first == "sley_core" and len(rest) == 1 and rest[0] in of_core:
                yield f"{first}.{rest[0]}"
