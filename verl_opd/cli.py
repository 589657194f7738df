"""The `verl-opd` command. Heavy packages are imported only by the verb that needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl_opd.config.recipes import recipe_names
from verl_opd.errors import ConfigError, RunError

if TYPE_CHECKING:
    from verl_opd.config.schema import Config

_OVERRIDES = """\
overrides are written as in Hydra:
  trainer.n_student_workers=2              set a key
  data.train_files=[a.jsonl,b.jsonl]       a list
  rollout.engine_kwargs.block_size=32      an entry of a free-form section
  ~data.val_files.python_functions         remove such an entry
keys of verl and Draft-OPD, and former keys, also work: docs/aliases.md

recipes: """


@dataclass(frozen=True)
class Verb:
    """A verb of the command."""

    help: str  # one line
    declare: Callable[[argparse.ArgumentParser], None]  # adds its arguments to its parser
    # runs the verb, given the parsed options and the whole command line; returns the exit code
    run: Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 a run that failed (reason on stderr), 2 a problem that
    the user can fix (one line on stderr), 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parse(arguments)
        return VERBS[options.verb].run(options, ["verl-opd", *arguments])
    except ConfigError as error:
        print(f"verl-opd: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunError as error:
        # Ray wraps what an actor raised, its traceback included
        cause = getattr(error, "cause", None) or error
        print(f"verl-opd: {type(cause).__name__}: {cause}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("verl-opd: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verl-opd",
        description="Train speculative-decoding drafts on the states they really meet.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name, verb in VERBS.items():
        verb.declare(
            verbs.add_parser(
                name,
                help=verb.help,
                description=verb.help,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    options, rest = parser.parse_known_args(arguments)
    unknown = rest
    if "overrides" in options:
        # argparse collects positionals once; overrides that follow an option end up in `rest`
        options.overrides += rest
        unknown = [text for text in options.overrides if text.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


# --- verbs that take a recipe ---


def _declare_recipe(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _OVERRIDES + ", ".join(recipe_names())
    parser.add_argument("recipe", help="name of a shipped recipe, or path of a .yaml file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")


def _run_recipe(
    work: Callable[[Config, list[str]], None],
    validated: bool,
    options: argparse.Namespace,
    command: list[str],
) -> int:
    from verl_opd.compat.translate import notices, translate
    from verl_opd.config.load import compose_config, load_config, to_yaml, validate

    overrides, translations = translate(options.overrides)
    print(notices(translations), end="", file=sys.stderr)
    if options.cfg:
        print(to_yaml(compose_config(options.recipe, overrides)), end="")
        return 0
    cfg = load_config(options.recipe, overrides)
    if validated:
        validate(cfg)
    work(cfg, command)
    return 0


def _train(cfg: Config, command: list[str]) -> None:
    from verl_opd.controller.run import train

    train(cfg, command)


def _eval(cfg: Config, command: list[str]) -> None:
    from verl_opd.commands.eval import run

    run(cfg, command)


def _bench(cfg: Config, command: list[str]) -> None:
    from verl_opd.commands.bench import run

    run(cfg, command)


def _plan(cfg: Config, command: list[str]) -> None:
    from verl_opd.commands.plan import plan

    plan(cfg)


def _doctor(cfg: Config, command: list[str]) -> None:
    from verl_opd.commands.doctor import print_diagnosis

    if not print_diagnosis(cfg):
        raise ConfigError(
            "this machine or configuration is not ready; see the lines marked MISSING"
        )


# --- the others ---


def _declare_export(parser: argparse.ArgumentParser) -> None:
    formats = ["vllm", "speculators", "sglang"]
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory of a run")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--format",
        choices=formats,
        default="vllm",
        help="file layout to write (speculators: one that names its target)",
    )
    parser.add_argument(  # the former name of --format
        "--reader",
        choices=formats,
        dest="format",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--force", action="store_true", help="replace an existing directory")


def _export(options: argparse.Namespace, command: list[str]) -> int:
    from verl_opd.training.export import export_checkpoint, serve_line

    out = export_checkpoint(options.checkpoint, options.out, options.force, options.format)
    print(f"exported {out}\nserve it with {serve_line(options.checkpoint, out, options.format)}")
    return 0


def _prepare(options: argparse.Namespace, command: list[str]) -> int:
    from verl_opd.commands.prepare import main as prepare

    return prepare()


def _recipe_verb(
    text: str, work: Callable[[Config, list[str]], None], validated: bool = True
) -> Verb:
    return Verb(text, _declare_recipe, partial(_run_recipe, work, validated))


VERBS: dict[str, Verb] = {
    "train": _recipe_verb("train a draft on its own rollouts, verified by the target", _train),
    "eval": _recipe_verb("measure held-out accept length of draft.path in the engine", _eval),
    "bench": _recipe_verb("measure what recording and draft pushes cost", _bench),
    "plan": _recipe_verb(
        "print placement, environments and memory of a run; starts nothing", _plan
    ),
    "doctor": _recipe_verb(  # reports wrong values itself, beside everything else
        "check versions, devices, memory, disk, models and data before a long run",
        _doctor,
        validated=False,
    ),
    "export": Verb(
        "write the draft of a checkpoint as a directory that an engine serves",
        _declare_export,
        _export,
    ),
    "prepare": Verb(
        "download the target of the quickstart and print its directory",
        lambda parser: None,
        _prepare,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
