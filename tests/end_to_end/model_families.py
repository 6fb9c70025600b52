"""What the table of model families compares: trainer with transformers, engine and export with the
trainer."""

import gc
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rollout_requests import generate_sequences
from tiny_families import tiny_config
from tiny_worker_models import PROMPT, RESPONSE, make_batch, policy_config, write_tokenizer
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_like.protocol import DataProto
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.models import ModelConfig, PolicyModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.models.lora import model_buffers
from verl_like.workers.models.model_check import check_model
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import fetch_weights, load_hf_config
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.weights.exports import WeightExport

# Legend: K response tokens of all rows.

MOST_PARAMETERS = 5_000_000
ENGINE_DEADLINE_S = 120


class Refused(ValueError):
    """verl_like refuses the family before a run starts, for this reason."""


class NotTried(ValueError):
    """The family is not one of language models alone, or cannot be so small."""


@dataclass
class TrainedFamily:
    """A tiny model of a family after one update, in the trainer; and what its numbers were compared
    with."""

    architecture: str
    path: str
    worker: ActorWorker
    export: WeightExport
    trainer_error: float
    """Largest difference of a log-probability between packed rows in the trainer and each row alone
    in transformers."""
    export_error: float
    """The same between the trainer and the model that it exported, after the update."""


def train_family(model_type: str, folder: Path) -> TrainedFamily:
    """Makes, checks, trains and exports a tiny model. Raises NotTried or Refused."""
    settings = policy_config(str(folder), prompts=8)
    refuse_kinds_of_layers(model_type, settings.model)
    config = config_of(model_type)
    model = random_model(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    try:
        check_model(
            settings.model, PolicyModel, fetch_weights(settings.model, key="model"), key="model"
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    rollout = settings.rollout.model_copy(update={"dtype": "float32", "temperature": 1.0})
    worker = ActorWorker(settings.model_copy(update={"rollout": rollout}))
    worker.init_model()
    rows = make_batch()
    trainer_error = largest_difference(
        log_probs_of(worker, rows), scores_of_single_rows(load(folder), rows)
    )
    worker.update_actor(rows)
    worker.save_hf(str(folder / "exported"))
    exported_scores = scores_of_single_rows(load(folder / "exported"), rows)
    export_error = largest_difference(log_probs_of(worker, rows), exported_scores)
    export = worker.export_weights(1)
    return TrainedFamily(
        type(model).__name__, str(folder), worker, export, trainer_error, export_error
    )


def refuse_kinds_of_layers(model_type: str, model: PolicyModelConfig) -> None:
    """Raises Refused for layers that the family has at any size, and NotTried for one that has
    another's."""
    try:
        config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except Exception as error:  # the code of any family may raise anything
        raise NotTried(f"no configuration without arguments ({type(error).__name__})") from error
    if config.model_type != model_type:
        raise NotTried(f"its language model is {config.model_type}")
    config.save_pretrained(model.path)
    try:
        load_hf_config(ModelConfig(path=model.path), key="model")
    except ValueError as error:
        raise Refused(str(error)) from error


def config_of(model_type: str) -> PretrainedConfig:
    """The family's tiny configuration. Raises NotTried where there is none."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # the code of any family may raise anything
        raise NotTried(f"not built at this size ({type(error).__name__})") from error
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        raise NotTried("not built at this size (parts beside the language model)")
    return tiny_config(model_type)  # from_config writes into the other


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model in which every parameter and every buffer of its own has an effect."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for _, buffer in model_buffers(model):
            if buffer.is_floating_point():
                buffer.add_(0.1 * torch.rand_like(buffer))
    return model


def load(folder: Path) -> PreTrainedModel:
    """What somebody else would load, with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


def log_probs_of(worker: ActorWorker, rows: DataProto) -> torch.Tensor:
    """(K,), of packed rows."""
    return worker.compute_log_prob(rows).batch["old_log_probs"].values()


@torch.no_grad()
def scores_of_single_rows(model: PreTrainedModel, rows: DataProto) -> torch.Tensor:
    """(K,) log-probabilities, by a pass of each row."""
    scores = []
    for prompt, response in zip(
        rows.batch["prompts"].unbind(), rows.batch["responses"].unbind(), strict=True
    ):
        logits = model(torch.cat([prompt, response])[None]).logits[0, -len(response) - 1 : -1]
        scores.append(logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return torch.cat(scores)


def largest_difference(first_K: torch.Tensor, second_K: torch.Tensor) -> float:
    return (first_K - second_K).abs().max().item()


def prompts() -> DataProto:
    rows = make_batch(seed=1)
    uids = [f"0-{row}" for row in range(len(rows))]
    return DataProto.from_dict(
        {"prompts": rows.batch["prompts"]}, {"uid": uids}, {"global_steps": 1}
    )


def engine_of(name: str, path: str) -> Any:
    sizes = {"prompt_length": PROMPT, "response_length": RESPONSE, "max_num_seqs": 8, "n": 2}
    log_probs = {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 1}
    config = RolloutConfig(name=name, dtype="float32", ignore_eos=True, **sizes, **log_probs)
    return get_rollout_engine(name)(
        config, PolicyModelConfig(path=path), rank=0, world_size=1, seed=5, device="cpu"
    )


def responses_of(name: str, path: str, export: WeightExport) -> DataProto:
    """What an engine writes with the exported weights, and its log-probabilities."""
    engine = engine_of(name, path)
    engine.load_weights([export], 1)
    return generate_sequences(engine, prompts())


def serve_vllm(connection: Connection) -> None:
    """A process in which one vLLM after the other writes responses; what fails is sent as a
    text."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models.registry import ModelRegistry

    torch.set_num_threads(1)
    known = set(ModelRegistry.get_supported_archs())
    connection.send("ready")
    while True:
        architecture, path, export = connection.recv()
        if architecture not in known:
            connection.send(None)
            continue
        answer: DataProto | str
        try:
            answer = responses_of("vllm", path, export)
        except Exception as error:  # whatever vLLM raises for the family
            answer = f"{type(error).__name__}: {error}"
        gc.collect()
        cleanup_dist_env_and_memory()
        connection.send(answer)


class VllmProcess:
    """The process of `serve_vllm`, started anew after one that died or hung.

    It has one family at a time: of two processes that write to each other at once, neither would
    read.
    """

    def __init__(self) -> None:
        self.waiting: deque[TrainedFamily] = deque()
        self.answers: deque[DataProto | str | None] = deque()
        self.is_busy = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_vllm, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is noticed
        assert self.connection.poll(ENGINE_DEADLINE_S), "vLLM was not imported"
        self.connection.recv()

    def submit(self, family: TrainedFamily) -> None:
        """Has it answered after those before it."""
        self.waiting.append(family)
        if self.is_busy and self.connection.poll():
            self._receive()
        self._send()

    def _send(self) -> None:
        if self.waiting and not self.is_busy:
            family = self.waiting.popleft()
            self.connection.send((family.architecture, family.path, family.export))
            self.is_busy = True

    def _receive(self) -> None:
        try:
            if self.connection.poll(ENGINE_DEADLINE_S):
                self.answers.append(self.connection.recv())
                self.is_busy = False
                return
            why = f"no answer in {ENGINE_DEADLINE_S} s"
        except EOFError:
            why = "its process died"
        self.answers.append(why)
        self.is_busy = False
        self.stop()
        self._start()

    def answer(self) -> DataProto | str | None:
        """Responses, why there are none, or None for a family that vLLM does not have; in the order
        of `submit`."""
        if not self.answers:
            self._receive()
            self._send()
        return self.answers.popleft()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def vllm_process() -> Iterator[VllmProcess]:
    process = VllmProcess()
    yield process
    process.stop()


def engine_error(family: TrainedFamily, responses: DataProto) -> float:
    """Largest difference of a log-probability between the engine that wrote responses and the
    trainer."""
    written_K = responses.batch["rollout_log_probs"].values()
    return largest_difference(written_K, log_probs_of(family.worker, responses))
