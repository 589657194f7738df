"""Prints docs/aliases.md from the alias table: python scripts/alias_page.py > docs/aliases.md"""

from __future__ import annotations

from verl_opd.compat.aliases import SECTIONS, AliasRow, Drop, To, With
from verl_opd.compat.translate import in_words

_INTRODUCTION = """\
# Names from verl and Draft-OPD, and former names

Every verb of `verl-opd` that takes a recipe also reads override lines written for verl and
Draft-OPD, as `key=value`, `+key=value` or `++key=value`, and lines with keys that were renamed
here (`warmup`, `training` and `trainer.warmup_steps`). The command first prints the translation of
each line. Recipes (YAML), those that they extend and the `config.yaml` of a former run may also
have the keys that were renamed here, with one printed line for each; a file that gives a key under
both names is an error. All other keys of recipes are those of
[`schema.py`](../verl_opd/config/schema.py).

- A key without a line keeps the value of the recipe, not the default of verl. There is one
  exception: where several old keys together decide one of ours, the missing ones have the defaults
  of Draft-OPD (`loss_mode` k3, weights 1 and 0, decay 0.9).
- *dropped*: the key has no effect, because this package always works that way or because no result
  depends on it. Where accepted values are listed, every other value is an error with the reason.
- *unsupported*: the key is an error with the reason.
- Two lines that set one key to different values are an error, also when one of them uses an old
  name. Of several lines with one old key the last one counts.
- `opd.convention=draft_opd` selects the anchors and the normaliser of Draft-OPD; it has no old
  name.

The tables are printed from `verl_opd/compat/aliases.py`:
`python scripts/alias_page.py > docs/aliases.md`.
"""


def markdown() -> str:
    """docs/aliases.md."""
    parts = [_INTRODUCTION]
    for section, rows in SECTIONS.items():
        lines = [
            f"| `{section}.{name}` | {_target(row)} | {_remark(row)} |"
            for name, row in rows.items()
        ]
        parts.append(
            "\n".join([f"## {section}", "", "| old key | here | |", "|---|---|---|", *lines, ""])
        )
    return "\n".join(parts)


def _target(row: AliasRow) -> str:
    if isinstance(row, To | With):
        return ", ".join(f"`{key}`" for key in ([row.new] if isinstance(row, To) else row.news))
    return "dropped" if isinstance(row, Drop) else "unsupported"


def _remark(row: AliasRow) -> str:
    if isinstance(row, To | With):
        return row.note
    accepted = (
        ", ".join(f"`{in_words(value)}`" for value in row.only) if isinstance(row, Drop) else ""
    )
    return f"{row.why}; accepted: {accepted}" if accepted else row.why


if __name__ == "__main__":
    print(markdown(), end="")
