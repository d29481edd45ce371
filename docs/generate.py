"""Write the reference pages from what they describe: recipe schemas and the command line.

    python docs/generate.py            # writes docs/reference/*.md
    python docs/generate.py --check    # fails if a committed page is out of date

Keys, types and defaults come from the pydantic schemas, meanings from the `#:` comments above the fields.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from pydantic import BaseModel

import d2sd.recipe
import d2sd.train_recipe
from d2sd.cli.main import main as cli
from d2sd.recipe import Recipe
from d2sd.train_recipe import TrainRecipe

REFERENCE = Path(__file__).with_name("reference")
NOTE = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"


def pages() -> dict[str, str]:
    """File name below docs/reference -> Markdown."""
    return {
        "recipe.md": schema_page(Recipe, "Recipe reference", "A recipe describes one bundle: `d2sd build RECIPE`."),
        "train-recipe.md": schema_page(
            TrainRecipe,
            "Training recipe reference",
            "A training recipe describes a pair of drafters: `d2sd train RECIPE`.",
        ),
        "cli.md": cli_page(),
    }


# -- recipes -----------------------------------------------------------------------------------------------------------


def schema_page(model: type[BaseModel], title: str, what: str) -> str:
    schema = model.model_json_schema()
    comments = {
        name: text for module in (d2sd.recipe, d2sd.train_recipe) for name, text in field_comments(module).items()
    }
    text = f"# {title}\n\n{NOTE}{what} Unknown keys are errors at every level. Relative paths start at the recipe's folder.\n"  # noqa: E501
    shown: dict[str, str] = {}  # mapping -> the path where its keys are listed
    for path, definition in _mappings(schema, schema, ""):
        if definition["title"] in shown:
            continue
        shown[definition["title"]] = path
        about = f"{_first_line(definition)}\n\n" if definition.get("description") else ""
        text += f"\n## {f'`{path}`' if path else 'Top level'}\n\n{about}"
        text += "| key | type | default | meaning |\n|---|---|---|---|\n"
        for key, field in definition["properties"].items():
            required = key in definition.get("required", [])
            below = _resolve(schema, field)
            default = f"`{_yaml(field.get('default'))}`"
            if required:
                default = "required"
            elif below is not None and field.get("default") is not None:
                default = "see below"
            meaning = comments.get((definition["title"], key)) or _first_line(below or {})
            first = shown.get(below["title"]) if below is not None else None
            kind = f"mapping, as `{first}`" if first else _type(schema, field)
            text += f"| `{key}` | {_cell(kind)} | {default} | {_cell(meaning)} |\n"
    return text


def field_comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the `#:` lines above the field, those of base classes included."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            found |= {(node.name, key): text for (name, key), text in found.items() if name == ast.unparse(base)}
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                start = field.lineno - 1
                first = start
                while lines[first - 1].strip().startswith("#:"):
                    first -= 1
                if first < start:
                    text = " ".join(line.strip().removeprefix("#:").strip() for line in lines[first:start])
                    found[node.name, field.target.id] = text
    return found


def _mappings(schema: dict[str, Any], definition: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping of a recipe with its dotted path, parents first."""
    yield path, definition
    for key, field in definition["properties"].items():
        below = _resolve(schema, field)
        if below is not None:
            yield from _mappings(schema, below, f"{path}.{key}".removeprefix("."))


def _resolve(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    """The definition that a field, its list items or one of its alternatives refer to."""
    for part in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "$ref" in part:
            found: dict[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return found if "properties" in found else None
    return None


def _type(schema: dict[str, Any], field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(schema, part) for part in field["anyOf"] if part.get("type") != "null")
    if "$ref" in field:
        return "mapping"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(schema, field['items'])}"
    if field.get("type") == "object":
        return "mapping"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]}" for key, sign in bounds.items() if key in field]
    return " ".join(
        [
            {"number": "number", "integer": "integer", "boolean": "true or false"}.get(field["type"], "text"),
            ", ".join(limits),
        ]
    ).strip()


def _yaml(value: Any) -> str:
    """A default as one would write it in a recipe."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{}" if not value else "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    return str(value).replace("'", '"')


def _first_line(definition: dict[str, Any]) -> str:
    return str(definition.get("description", "")).split("\n\n")[0].replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- command line ------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    text = (
        f"# Command line reference\n\n{NOTE}`d2sd-build` is `d2sd build`. Errors a user can cause exit with code 2.\n"
    )
    for name, command in _commands(cli, "d2sd"):
        text += f"\n## `{name}`\n\n{_help(command)}\n"
        context = click.Context(
            command, info_name=name, terminal_width=120, max_content_width=120, **command.context_settings
        )
        if not isinstance(command, click.Group):
            usage = " ".join(command.collect_usage_pieces(context))
            text += f"\n```text\n{name} {usage}\n```\n\n| option | meaning |\n|---|---|\n"
            for parameter in command.get_params(context):
                if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
                    text += f"| `{_cell(record[0])}` | {_cell(record[1])} |\n"
    return text


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name, **command.context_settings)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _commands(found, f"{name} {below}")


def _help(command: click.Command) -> str:
    """The docstring; its indented examples are Markdown's code blocks already."""
    return re.sub(r"\n{3,}", "\n\n", inspect.cleandoc(command.help or "").replace("\b", "")).strip()


def main() -> None:
    """Write the pages, or compare them."""
    old = []
    for name, text in pages().items():
        path = REFERENCE / name
        if "--check" in sys.argv:
            if not path.is_file() or path.read_text("utf-8") != text:
                old.append(path.name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    if old:
        sys.exit(f"out of date: {', '.join(old)}; run python docs/generate.py")


if __name__ == "__main__":
    main()
