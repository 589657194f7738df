"""Finds recipes and the example files they use: at the root of a checkout, or inside the installed
package.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from verl_opd.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_root() -> Path:
    """The folder that holds `recipes/` and `examples/`: the checkout, or the package itself when
    installed from a wheel.
    """
    return next(
        (root for root in (_PACKAGE, _PACKAGE.parent) if (root / "recipes").is_dir()), _PACKAGE
    )


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in (shipped_root() / "recipes").glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """File of a shipped recipe (by name), or of a user's own (by path, ending in .yaml).

    ConfigError lists the shipped ones.
    """
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        path = Path(recipe).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"recipe file {recipe} does not exist")
        if path.suffix != ".yaml":
            raise ConfigError(f"recipe file {recipe} must end in .yaml")
        return path
    names = recipe_names()
    if recipe in names:
        return shipped_root() / "recipes" / f"{recipe}.yaml"
    near = difflib.get_close_matches(recipe, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"unknown recipe {recipe!r}: {hint}shipped recipes are {', '.join(names)}; name a recipe "
        "of your own by its path (.yaml)"
    )


def resolve_path(path: str) -> str:
    """Absolute form of an existing path: relative ones are looked up in the current folder, then
    among the shipped files.

    A path that exists nowhere is returned unchanged: it may be a model id of a hub.
    """
    given = Path(path).expanduser()
    for candidate in (Path.cwd() / given, shipped_root() / given):
        if candidate.exists():
            return str(candidate)
    return str(given) if path.startswith("~") else path
