"""The rollout engine on vLLM, which runs in this process on CPU or a GPU.

With tensor parallelism a replica is several processes.
"""

import importlib.util
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from verl_like.single_controller.network import address_towards, open_store, store_of_group
from verl_like.workers.models.lora import adapted_names, parts_with_experts
from verl_like.workers.models.pretrained import empty_model
from verl_like.workers.models.routed_experts import RouterShape
from verl_like.workers.planning.flops import attention_heads
from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.request import Completion, GenerationRequest, NamedCompletion
from verl_like.workers.rollout.token_routing import record_of_bytes, record_of_returned
from verl_like.workers.rollout.vllm_families import shown_by_numbers
from verl_like.workers.weights.arrival import WeightSyncError
from verl_like.workers.weights.direct import init_info
from verl_like.workers.weights.exports import WeightExport, buckets_of

ADAPTER_ID = 1
"""vLLM's number for the policy's adapter. All versions have the same."""
_CPU_KV_BLOCK_TOKENS = 128
"""The tokens in a block of the cache of keys and values, as vLLM's CPU build divides it."""
_CPU_BATCHED_TOKENS = 8192
"""The tokens that a step computes on CPU at most, if the configuration does not say it."""
_RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""How long the processes of the group may take to meet."""


class VllmEngine(RolloutEngine):
    """One vLLM per process.

    The processes of a replica compute the same steps at the same time: they have the same prompts,
    seeds and results.
    """

    can_record_routing = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepare_import()
        if self.device == "cpu":
            self._check_head_size()
        if dist.is_initialized():
            raise RuntimeError(
                "vLLM makes this process's torch.distributed groups, but another role made them "
                "already; give the rollout role processes of its own."
            )
        self.shows_by_numbers = shown_by_numbers(self.hf_config) and not self.model_config.lora_rank
        self._has_no_weights = False
        self._has_no_cache = False
        """True if the engine freed this memory when it went to sleep."""
        self._num_loads = 0
        self._adapter_name = ""
        self._routers: RouterShape | None = None
        """The shape of the model's routers, if their routing is recorded."""
        self._router_layers: list[int] = []
        """The numbers of the layers that have a router, if their routing is recorded."""
        self._has_joined = False
        self._max_model_len = self.config.prompt_length + self.config.response_length
        if self.config.tensor_model_parallel_size == 1:
            self.llm = self._start("uni")
        else:
            executor = self._replica_executor()
            self.llm = self._start(executor)
            self._unlink_shared_memory()
        if self.records_routing:
            self._record_routing()

    def _prepare_import(self) -> None:
        """Checks that vLLM is installed, and sets environment variables. vLLM reads the level of
        its log when it is imported; vLLM and torch read the others later."""
        if importlib.util.find_spec("vllm") is None:
            extra = "gpu" if self.device == "cuda" else "cpu"
            raise ModuleNotFoundError(
                "rollout.name=vllm needs the package vllm, which is not installed: pip install -e "
                f"'.[{extra}]', or set rollout.name=hf."
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # FlashInfer's all-reduce adds in no fixed order, so that a run could not be repeated. It
        # also needs nvcc.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
        # Symmetric memory does not work: a process would look for the GPUs of the others, but each
        # process sees its own GPU alone.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
        if self.device == "cpu":
            # The worker group has given this process its share of the cores.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self._is_eager:
                # vLLM compiles a small sampling function even in eager mode. On CPU this takes
                # longer than it saves.
                os.environ["TORCHDYNAMO_DISABLE"] = "1"

    @property
    def _is_eager(self) -> bool:
        """True if vLLM compiles no layers, and captures no CUDA graphs."""
        chosen = self.config.enforce_eager
        return self.device == "cpu" if chosen is None else chosen

    def _make(self, **arguments: Any) -> Any:
        """Makes vLLM's LLM from its arguments. A subclass may make another with its methods."""
        import vllm

        return vllm.LLM(**arguments)

    def _start(self, executor: str | type) -> Any:
        """Makes the vLLM of this process; `executor` is vLLM's `distributed_executor_backend`."""
        config = self.config
        on_cpu = self.device == "cpu"
        # Asynchronous scheduling computes a step while weights are loaded. Its tokens would get the
        # version of the new weights, and its routing is refused by what vLLM records it with.
        schedules_ahead = config.kv_after_update != "keep" and not self._returns_routing
        max_num_seqs = config.max_num_seqs
        max_num_batched_tokens = config.max_num_batched_tokens
        if on_cpu:
            max_num_seqs = super().num_slots  # vLLM, which the own one asks, is not made yet
            # On CPU vLLM fails if it splits a prompt whose request has a seed. No prompt is split
            # if a whole sequence has room in a batch.
            wanted = config.max_num_batched_tokens or _CPU_BATCHED_TOKENS
            max_num_batched_tokens = max(wanted, self._max_model_len)
        adapter: dict[str, Any] = {}
        # With LoRA vLLM reads the frozen model from its folder, and the trainer sends the adapter.
        if self.model_config.lora_rank:
            max_rank = self._max_lora_rank()
            adapter = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
            hf = empty_model(self.model_config, AutoModelForCausalLM, key="actor_rollout_ref.model")
            if parts_with_experts(hf):
                # vLLM would make room for adapters of all experts.
                adapter["lora_target_modules"] = adapted_names(hf)
        recording: dict[str, Any] = {}
        if self.records_routing and not self._returns_routing:
            recording = {
                "worker_cls": "verl_like.workers.rollout.recording_worker.RecordingWorker",
                # By this vLLM tells what it compiled from what it compiles without a record.
                "additional_config": {"records_routing": True},
            }
        return self._make(
            **adapter,
            model=self.model_config.expanded_path,
            hf_overrides=self.model_config.hf_overrides,
            trust_remote_code=self.model_config.trust_remote_code,
            skip_tokenizer_init=True,  # token ids in, token ids out
            generation_config="vllm",  # no sampling default of the model's own
            load_format="auto" if adapter else "dummy",
            dtype=config.dtype,
            quantization=config.quantization,
            seed=self.seed,
            tensor_parallel_size=config.tensor_model_parallel_size,
            enable_expert_parallel=config.expert_parallel_size > 1,
            distributed_executor_backend=executor,
            # The custom kernel looks up the GPUs of other processes, but a process sees its own.
            disable_custom_all_reduce=True,
            max_model_len=self._max_model_len,
            # If the next two are None, vLLM chooses numbers that depend on the GPU.
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=not on_cpu,
            enable_prefix_caching=True,  # the samples of a prompt share its cache
            enforce_eager=self._is_eager,
            enable_sleep_mode=config.free_cache_engine and not on_cpu,
            gpu_memory_utilization=config.gpu_memory_utilization,
            async_scheduling=None if schedules_ahead else False,
            kv_cache_memory_bytes=self._cpu_kv_cache_bytes() if on_cpu else None,
            logprobs_mode="processed_logprobs",  # under the distribution the tokens are drawn from
            disable_log_stats=True,
            # vLLM's worker imports the module of the extension, which registers the back end.
            worker_extension_cls="verl_like.workers.rollout.vllm_routing.RoutingExtension",
            weight_transfer_config={"backend": "staged"},
            **recording,
            enable_return_routed_experts=self._returns_routing,
        )

    def _max_lora_rank(self) -> int:
        """Returns the smallest of vLLM's sizes of adapters that has room for the policy's."""
        from vllm.config.lora import MaxLoRARanks

        rank = self.model_config.lora_rank
        return min(size for size in get_args(MaxLoRARanks) if size >= rank)

    def _latent_size(self) -> int:
        """Returns how many values of a token vLLM keeps in a layer of multi-head latent attention
        (DeepSeek-V2, arXiv:2405.04434), or 0 for another attention."""
        # The module that defines it cannot be the first of vLLM that is imported.
        from vllm.config.model import ModelArchConfigConvertorBase

        model = ModelArchConfigConvertorBase(self.hf_config, self.hf_config.get_text_config())
        return model.get_head_size() if model.is_deepseek_mla() else 0

    def _check_latent_attention(self, size: int) -> None:
        """Raises ValueError if vLLM on CPU does not compute a model's latent attention.

        Args:
            size: `kv_lora_rank` and `qk_rope_head_dim` together.
        """
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        what = f"vLLM's latent attention on CPU, with which it computes {self.model_config.path},"
        otherwise = "Use another model, or rollout.name=hf."
        supported = CPUMLABackend.get_supported_head_sizes()
        if size not in supported:
            raise ValueError(
                f"{what} has kernels for kv_lora_rank + qk_rope_head_dim in {supported}, not "
                f"{size}. {otherwise}"
            )
        rope_type = self.hf_config.get_text_config().rope_parameters["rope_type"]
        if rope_type == "default":
            # Its kernel takes queries for contiguous. That of other types is written in torch.
            raise ValueError(
                f"{what} rotates queries wrongly with rope_type=default; yarn is right. {otherwise}"
            )

    def _check_head_size(self) -> None:
        """Raises ValueError if vLLM's attention on CPU does not support the model's head size."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        latent_size = self._latent_size()
        if latent_size:
            self._check_latent_attention(latent_size)
            return
        supported = CPUAttentionBackend.get_supported_head_sizes()
        for heads in attention_heads(self.hf_config.get_text_config()):
            if heads.size not in supported:
                raise ValueError(
                    f"vLLM's CPU attention has no kernel for head_dim={heads.size} of "
                    f"{self.model_config.path}; it has {supported}. Use a model with one of "
                    "these, or rollout.name=hf."
                )

    def _cpu_kv_cache_bytes(self) -> int:
        """Returns the bytes of a cache for `max_num_seqs` sequences of full length.

        It is at most the share `gpu_memory_utilization` of the free memory. On CPU vLLM would
        otherwise take that share of the whole machine's memory for each process.
        """
        config = self.config
        values_per_token = 0
        latent_size = self._latent_size()
        for heads in attention_heads(self.hf_config.get_text_config()):
            if latent_size:  # every process has it
                values_per_token += latent_size
                continue
            own = max(1, heads.key_value_number // config.tensor_model_parallel_size)
            values_per_token += 2 * own * heads.size
        dtype = getattr(torch, config.dtype)
        bytes_per_block = _CPU_KV_BLOCK_TOKENS * values_per_token * dtype.itemsize
        blocks_per_sequence = math.ceil(self._max_model_len / _CPU_KV_BLOCK_TOKENS)
        num_blocks = super().num_slots * blocks_per_sequence + 1  # vLLM keeps one for itself
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = int(config.gpu_memory_utilization * free)
        return min(num_blocks * bytes_per_block, limit)

    def _replica_executor(self) -> type:
        """Returns vLLM's executor for processes that vLLM did not start.

        It has the address at which the processes of this replica meet.
        """
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # The first process of each replica writes its address into a store of the whole group. The
        # store is kept as long as the engine, because others may read it after rank 0 has gone on.
        self._rendezvous = store_of_group(self.rank, _RENDEZVOUS_TIMEOUT)
        key = f"rollout_replica_{self.dp_rank}"
        if self.tp_rank == 0:
            store = open_store(address_towards(os.environ["MASTER_ADDR"]))
            self._rendezvous.set(key, f"{store.host}:{store.port}")
            self._store_of_replica = store
        # With this torch connects to the store. Otherwise it would open one of its own, which
        # listens on all addresses.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self._meeting_point = self._rendezvous.get(key).decode()
        if torch.cuda.device_count() == 1:  # the only GPU is number 0, whatever the local rank is
            local_rank = 0
        else:
            local_rank = int(os.environ.get("LOCAL_RANK", self.tp_rank))
        arguments = (f"tcp://{self._meeting_point}", self.tp_rank, local_rank)

        class ReplicaExecutor(ExecutorWithExternalLauncher):
            def _distributed_args(self) -> tuple[str, int, int]:
                return arguments

        return ReplicaExecutor

    def _unlink_shared_memory(self) -> None:
        """Removes the names of the replica's shared memory, which all of its processes have mapped.

        If the processes are killed, memory with a name would remain, and a later replica on the
        same port could not start.
        """
        from vllm.distributed.parallel_state import get_tp_group

        queue = get_tp_group().mq_broadcaster
        if queue is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
        if self.tp_rank == 0:
            port = self._meeting_point.rpartition(":")[2]
            for named in Path("/dev/shm").glob(f"{port}-tp:*"):  # made by vLLM's build for CPU
                named.unlink()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        # Each response is a request of its own. The n responses to one request of vLLM would come
        # back together, and their seeds would be neighbours.
        for request in requests:
            self.llm.llm_engine.add_request(*self._vllm_request(request))

    def _vllm_request(self, request: GenerationRequest) -> tuple[Any, ...]:
        """Returns the arguments of vLLM's `add_request` for a request."""
        import vllm
        from vllm.lora.request import LoRARequest

        prompt = vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        if self.config.kv_after_update == "keep":
            # Blocks of the prefix cache are found only by requests with the same salt, so this
            # request does not use blocks that older weights have computed.
            prompt["cache_salt"] = str(self._num_loads)
        sampling = request.sampling
        parameters = vllm.SamplingParams(
            seed=request.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone say what ends a response
            logprobs=0,  # only that of the drawn token
            flat_logprobs=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        # Every request has the adapter, see weights/vllm_adapter.py. Its name has the version and
        # is part of the key of vLLM's prefix cache.
        adapter = None
        if self._adapter_name:
            # `load_adapter` has brought its tensors, but vLLM wants some path.
            adapter = LoRARequest(self._adapter_name, ADAPTER_ID, lora_path="by tensors")
        arrival_time = None  # by vLLM's own clock
        return request.name, prompt, parameters, arrival_time, adapter

    def _step(self) -> list[NamedCompletion]:
        finished = [request for request in self.llm.llm_engine.step() if request.finished]
        ended = [(request.request_id, completion(request)) for request in finished]
        return self._with_routing(ended)

    @property
    def _returns_routing(self) -> bool:
        """Whether vLLM itself returns the routing of a response. This needs its Model Runner V2,
        which runs on GPUs alone."""
        return self.records_routing and self.device == "cuda"

    def _record_routing(self) -> None:
        method = "routed_layers" if self._returns_routing else "capture_routing"
        of_processes = self.llm.collective_rpc(method)
        self._router_layers, num_experts, top_k = of_processes[0]
        self._routers = RouterShape(len(self._router_layers), num_experts, top_k)

    def _with_routing(self, ended: Sequence[NamedCompletion]) -> list[NamedCompletion]:
        """Returns responses that have just ended with their routing, if it is recorded."""
        shape = self._routers
        if shape is None or not ended:
            return list(ended)
        names = []
        lengths = []
        for name, response in ended:
            prompt = self._in_flight[name].prompt_ids
            names.append(name)
            lengths.append(len(prompt) + len(response.token_ids))
        taken: Sequence[bytes | None] = [None] * len(ended)
        if not self._returns_routing:
            taken = self.llm.collective_rpc("take_routing", args=(names, lengths))[0]
        routed = []
        for (name, response), length, content in zip(ended, lengths, taken, strict=True):
            if content is None:
                returned = response.routed_experts
                record = record_of_returned(returned, length, self._router_layers, shape)
            else:
                record = record_of_bytes(content, length, shape)
            routed.append((name, replace(response, routed_experts=record)))
        return routed

    def _forget_routing(self, names: Collection[str]) -> None:
        """Drops what was captured of requests that are aborted."""
        if self._routers is not None and not self._returns_routing:
            self.llm.collective_rpc("forget_routing", args=(list(names),))

    def _has_work(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def _abort(self, names: Collection[str]) -> None:
        # They are aborted one by one: vLLM would free the blocks of several requests in an order
        # that differs between processes.
        for name in names:
            self.llm.llm_engine.abort_request([name])
        self._forget_routing(names)

    def forget_prompts(self) -> None:
        self.llm.reset_prefix_cache()

    @property
    def num_slots(self) -> int:
        return self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def agreed(self, number: int) -> int:
        from vllm.distributed.parallel_state import get_tp_group

        if self.config.tensor_model_parallel_size == 1:
            return number
        group = get_tp_group()
        told = torch.tensor(number)
        dist.broadcast(told, src=group.first_rank, group=group.cpu_group)
        return int(told)

    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        if self.config.sends_directly and not self._has_joined:
            first_rank = self.rank - self.tp_rank
            place = init_info(exports, first_rank, self.world_size)
            place["transport"] = self.config.weight_transport
            self.llm.init_weight_transfer_engine(WeightTransferInitRequest(place))
            self._has_joined = True
        buckets = buckets_of(exports)
        if self.model_config.lora_rank:
            self.llm.collective_rpc("load_adapter", args=(buckets, ADAPTER_ID))
            self.llm.update_weight_version(str(version))
            self._adapter_name = f"policy-v{version}"
        else:
            self.llm.start_weight_update()
            self.llm.update_weights(WeightTransferUpdateRequest({"buckets": buckets}))
            self.llm.finish_weight_update(weight_version=str(version))
        if self._has_no_cache:
            self.llm.wake_up()
            self._has_no_cache = False
        self._num_loads += 1
        if self.config.kv_after_update == "recompute":
            self.llm.reset_prefix_cache(reset_running_requests=True)
            return
        # Requests without a token, which vLLM calls prefilling, have the old salt and would find
        # blocks that the old weights have computed. So vLLM drops them and gets them again.
        states = self.llm.llm_engine.output_processor.request_states.values()
        without_token = [state.external_req_id for state in states if state.is_prefilling]
        self._abort(without_token)
        requests = [self._in_flight[name] for name in without_token]
        self._submit(requests)

    def _fingerprints(self) -> dict[str, int]:
        what = "adapter" if self.model_config.lora_rank else "weight"
        of_processes = self.llm.collective_rpc(f"{what}_fingerprints")
        if not self.model_config.lora_rank:
            self._require_known_layouts()
        return of_processes[0]

    def _require_known_layouts(self) -> None:
        """Raises WeightSyncError if the layout of a parameter is not known, unless the arrival of
        the family's weights is shown by numbers."""
        unknown_layouts = self.llm.collective_rpc("unknown_layouts")[0]
        if self.shows_by_numbers:
            self.unknown_parameters = tuple(sorted(unknown_layouts))
            return
        for name, hf_names in unknown_layouts.items():
            raise WeightSyncError(
                f"What was loaded into vLLM's parameter {name} of {self.model_config.path} cannot "
                f"be checked: it is not made of {hf_names} alone, which is what the trainer has "
                "for it, or not in a way that is known here. Set rollout.name=hf."
            )

    def _sleep(self) -> None:
        if self.config.free_cache_engine and self.device == "cuda":
            self.policy_version = None
            # Memory that torch has cached would otherwise count as memory that the engine frees.
            torch.cuda.empty_cache()
            free_before, _ = torch.cuda.mem_get_info()
            # Level 2 drops the weights, because the next update brings all of them. With LoRA it
            # brings the adapter alone, so level 1 copies the weights to the host.
            level = 1 if self.model_config.lora_rank else 2
            self.llm.sleep(level=level)
            free_after, _ = torch.cuda.mem_get_info()
            self._given_back = free_after - free_before
            self._has_no_weights = True
            self._has_no_cache = True

    def _wake(self) -> None:
        if self._has_no_weights:
            free, total = torch.cuda.mem_get_info()
            require_room(free, total, self._given_back)
            self.llm.wake_up(tags=["weights"])
            self._has_no_weights = False


def require_room(free: int, total: int, needed: int) -> None:
    """Raises ValueError if the engine cannot wake up for lack of memory.

    It needs `needed` bytes, and `free` of the device's `total` bytes are free.
    """
    if free < needed:
        raise ValueError(
            f"The rollout engine cannot wake up: it needs the {needed / 1e9:.1f} GB that it gave "
            f"back when it went to sleep, but only {free / 1e9:.1f} of the device's "
            f"{total / 1e9:.1f} GB are free, since weights, optimizer state and the like hold "
            f"{(total - free) / 1e9:.1f} GB. Lower rollout.gpu_memory_utilization by at least "
            f"{(needed - free) / total:.2f}, use more GPUs, or set fsdp_config.optimizer_offload "
            "or param_offload."
        )


def completion(request: Any) -> Completion:
    """Returns the response of a finished request, which is vLLM's RequestOutput."""
    (output,) = request.outputs
    versions = [(int(span.version), span.start, span.end) for span in output.weight_versions]
    return Completion(
        output.token_ids,
        output.logprobs.logprobs,
        tuple(versions),
        request.num_cached_tokens or 0,
        output.routed_experts,  # of all layers, and only if vLLM itself returns it
    )
