"""Rollout engine on vLLM, in this process: the CPU build on CPU, CUDA on GPU, tensor parallel over
processes."""

import importlib.util
import os
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from verl_like.single_controller.network import address_towards, open_store
from verl_like.workers.planning.flops import attention_heads
from verl_like.workers.rollout.base import CPU_NUM_SEQS, RolloutEngine
from verl_like.workers.rollout.request import Completion, GenerationRequest
from verl_like.workers.weights.direct import init_info
from verl_like.workers.weights.exports import WeightExport, buckets_of

ADAPTER_ID = 1
"""vLLM's number for the policy's adapter, of whatever version."""
_CPU_KV_BLOCK_TOKENS = 128
_CPU_BATCHED_TOKENS = 8192
_RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


class VllmEngine(RolloutEngine):
    """One vLLM per process. The processes of a replica compute in lockstep: same prompts, seeds and
    result."""

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
        self._has_no_weights = self._has_no_cache = False
        """What the engine gave back when it went to sleep."""
        self._num_loads = 0
        self._adapter_name = ""
        self._has_joined = False
        self._max_model_len = self.config.prompt_length + self.config.response_length
        self._cpu_num_seqs = self.config.max_num_seqs or CPU_NUM_SEQS
        is_alone = self.config.tensor_model_parallel_size == 1
        self.llm = self._start("uni" if is_alone else self._replica_executor())
        if not is_alone:
            self._unlink_shared_memory()

    def _prepare_import(self) -> None:
        """Checks that vLLM is installed, and sets what it reads from the environment as it is
        imported."""
        if importlib.util.find_spec("vllm") is None:
            extra = "gpu" if self.device == "cuda" else "cpu"
            raise ModuleNotFoundError(
                "rollout.name=vllm needs the package vllm, which is not installed: pip install -e "
                f"'.[{extra}]', or set rollout.name=hf."
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # FlashInfer's all-reduce adds in no fixed order, so that a run could not be repeated, and
        # needs nvcc.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
        # Nor is symmetric memory tried, whose processes would look for each other's GPUs: each sees
        # its own alone.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
        if self.device == "cpu":
            # The process's share of the cores is set by its group
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            # vLLM compiles one tiny sampling helper even in eager mode, which takes longer than it
            # ever saves on CPU.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"

    def _make(self, **arguments: Any) -> Any:
        import vllm

        return vllm.LLM(**arguments)

    def _start(self, executor: str | type) -> Any:
        config = self.config
        on_cpu = self.device == "cpu"
        adapter: dict[str, Any] = {}
        # VLLM reads the frozen model itself, and only adapters travel
        if rank := self.model_config.lora_rank:
            from vllm.config.lora import MaxLoRARanks

            largest = min(size for size in get_args(MaxLoRARanks) if size >= rank)
            adapter = {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}
        return self._make(
            **adapter,
            model=os.path.expanduser(self.model_config.path),
            hf_overrides=self.model_config.hf_overrides,
            trust_remote_code=self.model_config.trust_remote_code,
            skip_tokenizer_init=True,  # token ids in, token ids out
            generation_config="vllm",  # no sampling default of the model's own
            load_format="auto" if adapter else "dummy",
            dtype=config.dtype,
            quantization=config.quantization,
            seed=self.seed,
            tensor_parallel_size=config.tensor_model_parallel_size,
            distributed_executor_backend=executor,
            # That kernel looks its peers' devices up, and a process sees only its own
            disable_custom_all_reduce=True,
            max_model_len=self._max_model_len,
            # None is vLLM's own number, which depends on the GPU.
            max_num_seqs=self._cpu_num_seqs if on_cpu else config.max_num_seqs,
            # On CPU vLLM stops with an error at a part of a prompt whose request has a seed, so
            # prompts stay whole.
            max_num_batched_tokens=max(
                config.max_num_batched_tokens or _CPU_BATCHED_TOKENS, self._max_model_len
            )
            if on_cpu
            else config.max_num_batched_tokens,
            enable_chunked_prefill=not on_cpu,
            enable_prefix_caching=True,  # the samples of a prompt share its cache
            enforce_eager=config.enforce_eager or on_cpu,
            enable_sleep_mode=config.free_cache_engine and not on_cpu,
            gpu_memory_utilization=config.gpu_memory_utilization,
            # It has a step under way while weights are loaded, whose tokens would count as drawn by
            # the new ones.
            async_scheduling=False if config.kv_after_update == "keep" else None,
            kv_cache_memory_bytes=self._cpu_kv_cache_bytes() if on_cpu else None,
            logprobs_mode="processed_logprobs",  # under the distribution the tokens are drawn from
            disable_log_stats=True,
            # vLLM's worker imports the module of the extension, which registers the back end.
            worker_extension_cls="verl_like.workers.weights.vllm_loading.WorkerExtension",
            weight_transfer_config={"backend": "staged"},
        )

    def _check_head_size(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        supported = CPUAttentionBackend.get_supported_head_sizes()
        for heads in attention_heads(self.hf_config.get_text_config()):
            if heads.size not in supported:
                raise ValueError(
                    f"vLLM's CPU attention has no kernel for head_dim={heads.size} of "
                    f"{self.model_config.path}; it has {supported}. Use a model with one of "
                    "these, or rollout.name=hf."
                )

    def _cpu_kv_cache_bytes(self) -> int:
        """Cache for `max_num_seqs` sequences of full length, at most the configured share of the
        free memory.

        On CPU vLLM would otherwise take `gpu_memory_utilization` of the whole machine for each
        process.
        """
        config = self.config
        values_per_token = 0
        for heads in attention_heads(self.hf_config.get_text_config()):
            own = max(1, heads.key_value_number // config.tensor_model_parallel_size)
            values_per_token += 2 * own * heads.size
        bytes_per_token = values_per_token * getattr(torch, config.dtype).itemsize
        blocks_per_sequence = -(-self._max_model_len // _CPU_KV_BLOCK_TOKENS)
        blocks = self._cpu_num_seqs * blocks_per_sequence + 1  # vLLM keeps one block for itself
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(
            blocks * _CPU_KV_BLOCK_TOKENS * bytes_per_token,
            int(config.gpu_memory_utilization * free),
        )

    def _replica_executor(self) -> type:
        """vLLM's executor for processes that somebody else started, told where the processes of
        this replica meet."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # The replicas' first processes post their addresses at the group's. Kept for the engine's
        # lifetime: the others may read after rank 0 has gone on.
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank == 0:
            self._rendezvous = open_store(*place, timeout=_RENDEZVOUS_TIMEOUT)
        else:
            self._rendezvous = dist.TCPStore(
                *place, is_master=False, wait_for_workers=False, timeout=_RENDEZVOUS_TIMEOUT
            )
        key = f"rollout_replica_{self.dp_rank}"
        if self.tp_rank == 0:
            self._store_of_replica = open_store(address_towards(place[0]))
            self._rendezvous.set(
                key, f"{self._store_of_replica.host}:{self._store_of_replica.port}"
            )
        # torch then connects to this store, where it would open one that listens at all addresses.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self._meeting_point = self._rendezvous.get(key).decode()
        # Where each process sees one GPU, that GPU is number 0 whatever the local rank is.
        local_rank = (
            0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", self.tp_rank))
        )
        arguments = f"tcp://{self._meeting_point}", self.tp_rank, local_rank

        class ReplicaExecutor(ExecutorWithExternalLauncher):
            def _distributed_args(self) -> tuple[str, int, int]:
                return arguments

        return ReplicaExecutor

    def _unlink_shared_memory(self) -> None:
        """Takes the names off the replica's shared memory, which all of its processes have mapped
        by now.

        Killed processes would leave the memory behind, and a later replica on the same port could
        not start.
        """
        from vllm.distributed.parallel_state import get_tp_group

        queue = get_tp_group().mq_broadcaster
        if queue is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
        if self.tp_rank == 0:
            port = self._meeting_point.rpartition(":")[2]
            for named in Path("/dev/shm").glob(f"{port}-tp:*"):  # the CPU build's
                named.unlink()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        # A request a response: what vLLM makes of a request for n comes back together, with
        # neighbouring seeds.
        for request in requests:
            self.llm.llm_engine.add_request(*self._vllm_request(request))

    def _vllm_request(self, request: GenerationRequest) -> tuple[Any, ...]:
        """What vLLM's `add_request` takes."""
        import vllm
        from vllm.lora.request import LoRARequest

        prompt = vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        if self.config.kv_after_update == "keep":
            prompt["cache_salt"] = str(self._num_loads)  # blocks of other weights are not found
        sampling = request.sampling
        parameters = vllm.SamplingParams(
            seed=request.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone say what ends a response
            logprobs=0,  # of the drawn token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        # Every request has the adapter: see weights/vllm_adapter.py. vLLM keys its prefix cache by
        # the name.
        adapter = (
            LoRARequest(self._adapter_name, ADAPTER_ID, "by tensors")
            if self._adapter_name
            else None
        )
        return request.name, prompt, parameters, None, adapter

    def _step(self) -> list[tuple[str, Completion]]:
        finished = [request for request in self.llm.llm_engine.step() if request.finished]
        return [(request.request_id, completion(request)) for request in finished]

    def _has_work(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def _abort(self, names: Collection[str]) -> None:
        # Of several at once vLLM frees the blocks in an order that differs between processes
        for name in names:
            self.llm.llm_engine.abort_request([name])

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
            place = init_info(exports, self.rank - self.tp_rank, self.world_size)
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
        # A request without a token yet has the old salt, by which it would find blocks of the old
        # weights.
        states = self.llm.llm_engine.output_processor.request_states.values()
        queued = [state.external_req_id for state in states if state.is_prefilling]
        self._abort(queued)
        self._submit([self._in_flight[name] for name in queued])

    def _fingerprints(self) -> dict[str, int]:
        what = "adapter" if self.model_config.lora_rank else "weight"
        return self.llm.collective_rpc(f"{what}_fingerprints")[0]

    def _sleep(self) -> None:
        if self.config.free_cache_engine and self.device == "cuda":
            # Level 2 drops the weights instead of copying them to the host: the next sync brings
            # new ones, but not the frozen ones under an adapter.
            self.policy_version = None
            # What torch has kept of freed memory is not what waking takes back
            torch.cuda.empty_cache()
            free_before, _ = torch.cuda.mem_get_info()
            self.llm.sleep(level=1 if self.model_config.lora_rank else 2)
            self._given_back = torch.cuda.mem_get_info()[0] - free_before
            self._has_no_weights = self._has_no_cache = True

    def _wake(self) -> None:
        if self._has_no_weights:
            require_room(*torch.cuda.mem_get_info(), self._given_back)
            self.llm.wake_up(tags=["weights"])
            self._has_no_weights = False


def require_room(free: int, total: int, needed: int) -> None:
    """Raises ValueError unless `needed` bytes are free on a device of `total` bytes, so that the
    engine can wake up."""
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
    (output,) = request.outputs
    versions = tuple((int(span.version), span.start, span.end) for span in output.weight_versions)
    token_ids = np.array(output.token_ids, np.int64)
    log_probs = np.array(output.logprobs.logprobs, np.float32)
    return Completion(token_ids, log_probs, versions, request.num_cached_tokens or 0)
