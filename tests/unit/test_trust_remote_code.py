"""Code that comes with a model runs only where it is trusted."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_like.workers.config.models import ModelConfig
from verl_like.workers.models.pretrained import load_hf_config

CODE = """
from pathlib import Path
from transformers import PretrainedConfig

Path(__file__).with_name("was_run").touch()


class OwnConfig(PretrainedConfig):
    model_type = "of_a_stranger"
    taste = "salty"
"""


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives transformers a folder of its own for the code of models, which later tests do not
    find."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_of_a_model_runs_only_where_it_is_trusted(tmp_path: Path, own_modules: None):
    model = tmp_path / "model"
    model.mkdir()
    (model / "own_config.py").write_text(CODE)
    settings = {"model_type": "of_a_stranger", "auto_map": {"AutoConfig": "own_config.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_hf_config(ModelConfig(path=str(model)), key="model")
    assert not list(tmp_path.rglob("was_run"))
    config = load_hf_config(ModelConfig(path=str(model), trust_remote_code=True), key="model")
    assert config.taste == "salty" and list(tmp_path.rglob("was_run"))
