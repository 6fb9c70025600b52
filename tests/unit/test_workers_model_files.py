"""Files of a model that cannot be used are refused with the key, the file and what is wrong."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny_worker_models import write_model

from verl_like.simple import Actor
from verl_like.workers.config.models import PolicyModelConfig
from verl_like.workers.models import hub
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import empty_model, load_hf_config, load_tokenizer

KEY = "actor_rollout_ref.model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(write_model(tmp_path / "policy"))


def refusal(model: Path, read: Callable = load_hf_config, **overrides: Any) -> str:
    with pytest.raises(ValueError) as error:
        read(PolicyModelConfig(path=str(model), override_config=overrides), key=KEY)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": -1},
            "num_hidden_layers=-1 in the model's configuration, expected a positive number",
        ),
        (
            {"num_attention_heads": -4},
            "num_attention_heads=-4 in the model's configuration, expected a positive",
        ),
        (
            {"model_type": "nothing_like"},
            "its config.json cannot be used (ValueError: .*model type `nothing_like`",
        ),
        (
            {"hidden_size": "many"},
            "its config.json cannot be used (.*'hidden_size' expected int, got str",
        ),
    ],
)
def test_a_configuration_with_a_value_that_cannot_be_names_the_key_and_the_value(
    model: Path, change: dict, message: str
):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    said = refusal(model)
    assert said.startswith(f"{KEY}.path={model}: ")
    assert re.search(message.replace("(", r"\("), said), said
    if "model_type" not in change:
        (name, value), *_ = change.items()
        (model / "config.json").write_text(json.dumps(config))
        assert refusal(model, **change).startswith(f"{KEY}.override_config.{name}={value!r}")


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{", b"[]", b"[" * 100_000])
def test_a_configuration_that_is_no_json_object_names_the_key_and_the_file(
    model: Path, content: bytes
):
    (model / "config.json").write_bytes(content)
    assert refusal(model).startswith(f"{KEY}.path={model}: its config.json cannot be used (")


def test_sizes_of_which_no_model_can_be_made_name_the_key(model: Path):
    def read(config: PolicyModelConfig, key: str) -> None:
        empty_model(config, PolicyModel.auto_class, key=key)

    said = refusal(model, read, intermediate_size=-3)
    assert said.startswith(
        f"{KEY}.path={model}: no model can be made of its config.json (RuntimeError: "
    )


BAD = [b"", b"\xff\x00", b"[]", b"[" * 100_000]
FILES = [("tokenizer.json", content) for content in (*BAD, b"{}")]


@pytest.mark.parametrize(
    ("name", "content"), [*FILES, *(("tokenizer_config.json", content) for content in BAD)]
)
def test_a_tokenizer_that_cannot_be_read_is_named(model: Path, name: str, content: bytes):
    (model / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_tokenizer(PolicyModelConfig(path=str(model)))
    place = model / name if name == "tokenizer.json" else model
    assert str(error.value).startswith(f"{place}: no tokenizer can be read there (")
    assert "model.tokenizer_path" in str(error.value)


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes another address the hub, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def use(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/{revision}/{filename}"
        )

    return use


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_a_name_that_is_no_model_is_refused_where_the_hub_cannot_be_reached(
    online: Callable, endpoint: str
):
    online(endpoint)
    said = refusal(Path("someone/nothing-like-this"))
    assert said.startswith(
        f"{KEY}.path=someone/nothing-like-this: neither a folder, nor a model in this machine's cac"
    )
    assert endpoint in said


def test_a_hub_that_does_not_answer_is_not_waited_for(
    online: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "_ANSWER_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        online(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "nor one that http://127.0.0.1" in refusal(Path("someone/nothing-like-this"))


def put_into_the_cache(cache: Path, file: str, text: str) -> None:
    """A file of the model `someone/cached`, where the hub's library looks for one that it has
    downloaded."""
    cached = cache / "models--someone--cached"
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc" / file).write_text(text)


def test_a_model_of_the_cache_needs_no_hub(online: Callable, model: Path, tmp_path: Path):
    online("http://127.0.0.1:1")
    put_into_the_cache(tmp_path / "cache", "config.json", (model / "config.json").read_text())
    hub.require_hub_model("someone/cached", "the model")
    with pytest.raises(ValueError, match="the model: neither a folder"):
        hub.require_hub_model("someone/other", "the model")


def test_a_tokenizer_that_the_hub_does_not_give_is_refused_without_a_wait(
    online: Callable, model: Path
):
    online("http://127.0.0.1:1")
    config = PolicyModelConfig(path=str(model), tokenizer_path="someone/nothing-like-this")
    with pytest.raises(
        ValueError, match=r"model.tokenizer_path=someone/nothing-like-this: neither a folder"
    ):
        load_tokenizer(config)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_the_cache_needs_no_hub_whichever_files_it_has(
    online: Callable, tmp_path: Path, file: str
):
    online("http://127.0.0.1:1")
    put_into_the_cache(tmp_path / "cache", file, "{}")
    hub.require_hub_model(
        "someone/cached", "the tokenizer", "tokenizer.json", "tokenizer_config.json"
    )
    with pytest.raises(ValueError, match="the model: neither a folder"):
        hub.require_hub_model("someone/cached", "the model")


def test_a_model_of_a_script_that_the_hub_does_not_give_is_named(online: Callable):
    online("http://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"^Actor\(pretrained='someone/nothing-like-this'\): neither a folder"
    ):
        Actor(pretrained="someone/nothing-like-this")
