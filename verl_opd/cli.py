"""The `verl-opd` command. Heavy packages are imported only by the verb that needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_opd.config.recipes import recipe_names
from verl_opd.errors import ConfigError, RunError

_RECIPE_VERBS = {
    "train": "train a draft on the states it meets while the target verifies it",
    "eval": "measure held-out accept length of draft.path in the engine",
    "bench": "measure what recording and draft pushes cost",
    "plan": "show where everything would run and how much memory it takes; starts nothing",
    "doctor": "check versions, devices, memory, disk, models and data before a long run does",
}
_OVERRIDES = """\
overrides are written as in Hydra:
  trainer.n_student_workers=2              set a key
  data.train_files=[a.jsonl,b.jsonl]       a list
  rollout.engine_kwargs.block_size=32      an entry of a free-form section
  ~data.val_files.python_functions         remove such an entry
names of verl and Draft-OPD are read as well: docs/aliases.md

recipes: """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 a run that failed (what happened, on stderr), 2 a problem
    the user can fix (one line on stderr), 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(arguments)
    except ConfigError as error:
        print(f"verl-opd: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunError as error:
        cause = (
            getattr(error, "cause", None) or error
        )  # Ray wraps what an actor raised, its traceback included
        print(f"verl-opd: {type(cause).__name__}: {cause}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("verl-opd: interrupted", file=sys.stderr)
        return 130
    return 0


def _dispatch(arguments: list[str]) -> None:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.verb == "export":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        from verl_opd.training.export import export_checkpoint, serve_line

        out = export_checkpoint(options.checkpoint, options.out, options.force, options.reader)
        print(
            f"exported {out}\nserve it with {serve_line(options.checkpoint, out, options.reader)}"
        )
        return
    # argparse collects positionals once; overrides that follow an option end up in `rest`.
    overrides = [*options.overrides, *rest]
    unknown = [text for text in overrides if text.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _run_recipe(
        options.verb, options.recipe, overrides, options.cfg is not None, ["verl-opd", *arguments]
    )


def _run_recipe(
    verb: str, recipe: str, overrides: list[str], print_only: bool, command: list[str]
) -> None:
    from verl_opd.compat.aliases import table, translate
    from verl_opd.config.load import compose_config, load_config, to_yaml, validate

    print(table(translate(overrides)[1]), end="", file=sys.stderr)
    if print_only:
        print(to_yaml(compose_config(recipe, overrides)), end="")
        return
    cfg = load_config(recipe, overrides)
    if verb == "doctor":  # looks at the values itself, beside everything else
        from verl_opd.commands.doctor import report

        if not report(cfg):
            raise ConfigError(
                "this machine or configuration is not ready; see the lines marked MISSING"
            )
        return
    validate(cfg)
    if verb == "train":
        from verl_opd.controller.run import train

        train(cfg, command)
    elif verb == "eval":
        from verl_opd.commands.eval import run

        run(cfg, command)
    elif verb == "plan":
        from verl_opd.commands.plan import plan

        plan(cfg)
    else:
        from verl_opd.commands.bench import run

        run(cfg, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-opd",
        description="Train speculative-decoding drafts on the states they really meet.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    epilog = _OVERRIDES + ", ".join(recipe_names())
    for verb, text in _RECIPE_VERBS.items():
        command = verbs.add_parser(
            verb,
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("recipe", help="name of a shipped recipe, or path of a .yaml file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="changes to the recipe"
        )
        command.add_argument(
            "--cfg", choices=["job"], help="print the resolved configuration and stop"
        )
    text = "write the draft of a checkpoint as a directory that an engine serves"
    export = verbs.add_parser("export", help=text, description=text)
    export.add_argument("checkpoint", type=Path, help="checkpoint directory of a run")
    export.add_argument("--out", type=Path, required=True, help="directory to write")
    readers = ["vllm", "speculators", "sglang"]
    export.add_argument(
        "--reader",
        choices=readers,
        default="vllm",
        help="whose file layout (vllm; speculators: one that names its target)",
    )
    export.add_argument("--force", action="store_true", help="replace an existing directory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
