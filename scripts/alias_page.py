"""Prints docs/aliases.md from the table of names of verl and Draft-OPD: python
scripts/alias_page.py > docs/aliases.md
"""

from __future__ import annotations

from verl_opd.compat.aliases import SECTIONS, Drop, Row, To, With, in_words

_INTRODUCTION = """\
# Names from verl and Draft-OPD

`verl-opd train`, `eval`, `bench` and `doctor` also read override lines written for verl and
Draft-OPD, as `key=value`, `+key=value` or `++key=value`. What became of them is printed once,
before anything else. Recipes (YAML) know only the keys of
[`schema.py`](../verl_opd/config/schema.py).

- What no line mentions keeps the value of the recipe, not the default of verl. Only where several
  old keys decide one of ours do the missing ones count as in Draft-OPD: `loss_mode` k3, weights 1
  and 0, decay 0.9.
- A key marked *dropped* asks for what is the case anyway, or for what no result depends on; where
  accepted values are named, others are refused with the reason.
- Two lines that decide one key differently are refused, in whatever spelling. Of several lines with
  one old key the last one counts.
- `opd.convention=draft_opd` chooses the anchors and the normaliser of Draft-OPD; it has no old
  name.

The tables are made from `verl_opd/compat/aliases.py`:
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


def _target(row: Row) -> str:
    if isinstance(row, To | With):
        return ", ".join(f"`{key}`" for key in ([row.new] if isinstance(row, To) else row.news))
    return "dropped" if isinstance(row, Drop) else "refused"


def _remark(row: Row) -> str:
    if isinstance(row, To | With):
        return row.note
    accepted = (
        ", ".join(f"`{in_words(value)}`" for value in row.only) if isinstance(row, Drop) else ""
    )
    return f"{row.why}; accepted: {accepted}" if accepted else row.why


if __name__ == "__main__":
    print(markdown(), end="")
