"""The Hugging Face folder that is made of a checkpoint is the one that the workers write."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_ranks import ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_worker_models import (
    critic_config,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    write_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from verl_like.export import base_model, export, main
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker


def folder_with_settings(path: Path, tie: bool) -> str:
    """A model whose generation settings and chat template are not those that its configuration
    implies."""
    model = write_model(path, tie=tie)
    GenerationConfig(
        do_sample=True, temperature=0.3, eos_token_id=1, pad_token_id=0
    ).save_pretrained(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.save_pretrained(model)
    return model


def trained_actor(folder: Path, tie: bool = False, dtype: str = "bfloat16") -> LocalWorkerGroup:
    group = local_group(
        ActorWorker, policy_config(folder_with_settings(folder, tie), fsdp={"dtype": dtype})
    )
    group.update_actor(make_batch()).get()
    return group


def trained_critic(folder: Path) -> LocalWorkerGroup:
    group = local_group(
        CriticWorker, critic_config(folder_with_settings(folder, tie=False)), seed=1
    )
    group.update_critic(make_batch()).get()
    return group


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of an actor in a checkpoint, and its parameters."""
    folder = tmp_path_factory.mktemp("step")
    group = trained_actor(folder / "model")
    group.save_checkpoint(str(folder / "actor/checkpoint"))
    return folder / "actor", parameters_of(group.workers[0])


def copy_of(actor: tuple[Path, dict[str, torch.Tensor]], folder: Path) -> Path:
    """A copy of the actor's checkpoint; returns the folder of the files."""
    return Path(shutil.copytree(actor[0] / "checkpoint", folder / "actor/checkpoint"))


@pytest.mark.parametrize(
    "make",
    [
        trained_actor,
        lambda folder: trained_actor(folder, tie=True, dtype="float32"),
        trained_critic,
    ],
    ids=["actor", "actor with tied embeddings", "critic"],
)
def test_an_export_is_byte_for_byte_the_folder_that_the_workers_write(make, tmp_path: Path):
    group = make(tmp_path / "model")
    group.save_checkpoint(str(tmp_path / "role/checkpoint"))
    group.save_hf(str(tmp_path / "written"))
    export(tmp_path / "role", tmp_path / "exported")
    assert files_of(tmp_path / "exported") == files_of(tmp_path / "written")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    # Of the weights, which are stored in float32
    assert config["dtype"] == group.workers[0].engine.dtype


def test_an_exported_policy_loads_in_transformers_with_its_tokenizer_and_generation_settings(
    actor, tmp_path: Path
):
    role_folder, parameters = actor
    export(role_folder, tmp_path / "exported")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert hf.dtype == torch.bfloat16 and hf.generation_config.temperature == 0.3
    assert all(torch.equal(p, parameters[name].bfloat16()) for name, p in hf.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)
        == "[1+2=]"
    )


def test_an_exported_critic_loads_in_transformers_with_its_head(tmp_path: Path):
    group = trained_critic(tmp_path / "model")
    group.save_checkpoint(str(tmp_path / "critic/checkpoint"))
    export(tmp_path / "critic", tmp_path / "exported")
    hf = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported")
    assert hf.num_labels == 1
    assert torch.equal(hf.score.weight, parameters_of(group.workers[0])["score.weight"])


def test_the_dtype_can_be_chosen(actor, tmp_path: Path):
    role_folder, parameters = actor
    export(role_folder, tmp_path / "exported", "float32")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == parameters.keys()
    assert all(torch.equal(exported[name], parameters[name]) for name in parameters)
    assert any((parameters[name] != parameters[name].bfloat16()).any() for name in parameters)
    assert json.loads((tmp_path / "exported/config.json").read_text())["dtype"] == "float32"


def test_the_optimizer_is_not_read(actor, tmp_path: Path):
    export(actor[0], tmp_path / "exported")
    (shard,) = copy_of(actor, tmp_path).glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        model = {name: file.get_tensor(name) for name in file.keys() if name.startswith("model.")}  # noqa: SIM118
        assert len(file.keys()) > 3 * len(model)
        metadata = file.metadata()
    save_file(model, shard, metadata=metadata)
    export(tmp_path / "actor", tmp_path / "without")
    assert files_of(tmp_path / "without") == files_of(tmp_path / "exported")


def test_what_is_no_checkpoint_is_refused(actor, tmp_path: Path):
    for wrong in (actor[0].parent, actor[0] / "checkpoint", tmp_path / "nothing"):
        with pytest.raises(
            ValueError, match=rf"{wrong} has no checkpoint .*: give the folder of a role"
        ):
            export(wrong, tmp_path / "exported")
    (copy_of(actor, tmp_path) / "config.json").unlink()
    with pytest.raises(ValueError, match="has no checkpoint"):
        export(tmp_path / "actor", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_run_that_trained_the_whole_model_has_no_adapter_to_export(actor, tmp_path: Path):
    message = (
        rf"{actor[0]}/checkpoint has no adapter \(adapter_config.json\), because its run trained "
        "the whole model: export it without --adapter-only, or train with lora_rank above 0"
    )
    with pytest.raises(ValueError, match=message):
        export(actor[0], tmp_path / "exported", adapter_only=True)
    assert not (tmp_path / "exported").exists()


def test_a_folder_that_exists_is_left_as_it_is(actor, tmp_path: Path):
    (tmp_path / "exported").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/exported exists"):
        export(actor[0], tmp_path / "exported")
    assert not files_of(tmp_path / "exported")


def test_a_file_that_is_cut_is_named(actor, tmp_path: Path):
    (shard,) = copy_of(actor, tmp_path).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{shard} is damaged \(.*\): export another checkpoint"):
        export(tmp_path / "actor", tmp_path / "exported")


def test_a_model_with_code_of_its_own_is_refused_and_its_code_is_not_run(actor, tmp_path: Path):
    config = copy_of(actor, tmp_path) / "config.json"
    settings = json.loads(config.read_text()) | {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
    }
    settings["auto_map"] = {
        name: f"own.Own{name[4:]}" for name in ("AutoConfig", "AutoModelForCausalLM")
    }
    config.write_text(json.dumps(settings))
    (config.parent / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(
        ValueError, match=r"is of a OwnForCausalLM, which transformers .* does not have"
    ):
        export(tmp_path / "actor", tmp_path / "exported")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("role", "path"),
    [("actor", "/models/policy"), ("critic", "/models/values"), ("model", "/models/examples")],
)
def test_the_model_that_a_role_began_with_is_the_one_of_its_key(
    role: str, path: str, tmp_path: Path
):
    config = {
        "actor_rollout_ref": {"model": {"path": "/models/policy"}},
        "critic": {"model": {"path": "/models/values"}},
        "model": {"path": "/models/examples"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert base_model(tmp_path / "global_step_3" / role / "checkpoint") == path


def run_on_a_small_disk(arguments: list[str], errors: str):
    """Ends with the command's exit status. What it says is in the file `errors`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes of a file
    sys.argv[1:] = arguments
    with open(errors, "w") as sys.stderr:
        status = main()
    sys.exit(status)


def test_the_command_names_a_disk_that_takes_no_more(actor, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    arguments = [str(actor[0]), f"{tmp_path}/disk/model"]
    errors = tmp_path / "errors"
    process = ranks().Process(target=run_on_a_small_disk, args=(arguments, str(errors)))
    process.start()
    process.join(120)
    said = errors.read_text()
    assert process.exitcode == 2, said
    assert f"{tmp_path}/disk/model cannot be written (" in said and "Traceback" not in said
    assert not files_of(tmp_path / "disk")


@pytest.mark.proof
def test_the_command_exports(actor, tmp_path: Path):
    command = [sys.executable, "-m", "verl_like.export", str(actor[0])]
    done = subprocess.run(
        [*command, f"{tmp_path}/new/model", "--dtype=float32"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    export(actor[0], tmp_path / "exported", "float32")
    assert files_of(tmp_path / "new/model") == files_of(tmp_path / "exported")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_the_command_reads_its_arguments_and_says_what_they_are(
    actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["export.py", *arguments])
        return main()

    role_folder = str(actor[0])
    for dtype in ("float32", "bfloat16"):
        assert command(role_folder, str(tmp_path / f"new/{dtype}/model"), "--dtype", dtype) == 0
        export(actor[0], tmp_path / dtype, dtype)
        assert files_of(tmp_path / f"new/{dtype}/model") == files_of(tmp_path / dtype)
    capsys.readouterr()
    assert command("--ema", role_folder, str(tmp_path / "averaged")) == 2
    assert (
        f"verl_like: {role_folder}/checkpoint has no average of the weights"
        in capsys.readouterr().err
    )
    assert command("--adapter-only", role_folder, str(tmp_path / "adapter")) == 2
    assert f"verl_like: {role_folder}/checkpoint has no adapter" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command(role_folder, str(tmp_path / "half"), "--dtype=float16")
    assert ended.value.code == 2 and "invalid choice: 'float16'" in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        command("--help")
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(
        "usage: python -m verl_like.export [-h] [--dtype {bfloat16,float32}] [--ema] "
        "[--adapter-only] CHECKPOINT_ROLE_FOLDER OUT\n\n"
        "Makes a Hugging Face folder of a model in a checkpoint\n"
    )
    for part in (
        "positional arguments: CHECKPOINT_ROLE_FOLDER global_step_N/<role> OUT the folder to make "
        "options: ",
        " --dtype {bfloat16,float32} default: in which the layers computed --ema the average of "
        "the weights (actor.ema_decay) --adapter-only the LoRA adapter alone, in peft's format",
    ):
        assert part in " ".join(said.split())
