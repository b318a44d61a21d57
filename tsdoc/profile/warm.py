"""A new process that finds the entry: how soon its first token comes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tsdoc.errors import TsdocError
from tsdoc.kernels.devices import Device
from tsdoc.profile.prompt import ProfilePrompt, describe_prompt
from tsdoc.profile.results import Warm
from tsdoc.settings import Settings

STAGES = ("python", "imports", "model", "open", "first token")
_START = (
    "import sys; sys.path.append(sys.argv[1]); from tsdoc.profile.warm_main import main; main()"
)


class WarmStartError(TsdocError):
    """The new process ended before its first token."""

    code = "warm_start"


def measure_warm(
    prompt: ProfilePrompt, settings: Settings, device: Device, *, store: Path, ids: Path
) -> Warm:
    """Starts a process that loads the model, opens the entry in `store` and answers.

    Args:
        prompt: The model and the question; its tokens are in the file `ids`.
        settings: As in this process.
        device: "cpu" or "cuda".
        store: Root of the store that holds the entry.
        ids: A .npy file of token ids.

    Raises:
        WarmStartError: it ended early; the message says what it said last.
    """
    job = {
        "settings": settings.model_dump(mode="json"),
        "device": device,
        "prompt": describe_prompt(prompt),
        "store": str(store),
        "ids": str(ids),
    }
    with tempfile.TemporaryFile() as errors:
        stages, code = _start(job, errors)
        errors.seek(0)
        said = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    if len(stages) < len(STAGES):
        raise WarmStartError(
            f"the new process ended early: {said[-1] if said else f'exit code {code}'}"
        )
    return Warm(stages_s=stages)


def _start(job: dict[str, Any], errors: IO[bytes]) -> tuple[dict[str, float], int]:
    """The stages that the process reached, and its exit code; it has ended."""
    begun = time.time()
    process = subprocess.Popen(
        # -P: the current folder is no place to import from.
        [sys.executable, "-P", "-c", _START, str(Path(__file__).resolve().parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C is for the parent, which then ends this process
    )
    try:
        stages = _follow(process, job, begun)
    finally:
        process.kill()
        process.communicate()
    return stages, process.returncode


def _follow(process: subprocess.Popen[str], job: dict[str, Any], begun: float) -> dict[str, float]:
    """Seconds from stage to stage, as the process says that it has reached them."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 - asked for
    stages: dict[str, float] = {}
    last = begun
    try:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
    except BrokenPipeError:
        return stages
    finally:
        process.stdin = None
    for line in process.stdout:  # libraries may have something to say as well
        said, _, moment = line.strip().partition("\t")
        if said == STAGES[len(stages)]:
            stages[said] = float(moment) - last
            last = float(moment)
        if len(stages) == len(STAGES):
            break
    return stages
