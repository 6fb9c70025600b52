"""The runs of `make gpu-rehearsal`: each is a training command at toy size, and what it has to
show."""

import shlex
from dataclasses import dataclass
from pathlib import Path

DRIFT_METRIC = "training/rollout_probs_diff_mean"
KL_METRIC = "actor/rollout_kl"
"""Of an update, between the probabilities of the engine that drew and those of the trainer: of the
first update of a version it is drift."""


@dataclass(frozen=True)
class Run:
    """A run on the null GPU.

    name: also of its folder. what: for the table. module, config: the entry point, and its folder
    and name below examples/, or none. script: one whose overrides come before the run's own.
    overrides: of the configuration; `{device}` becomes cuda, or cpu in the reference. measure: the
    metric that is judged, the drift of engine and trainer by its bound, another as a loss by the
    CPU's. reference: another run whose losses on the CPU count. killed_after: the run is killed as
    soon as this step's checkpoint is there, and the same command continues it. equal_to: another
    run, whose numbers are these. caches_memory: torch keeps freed memory, which vLLM's sleep needs.
    has_numbers: without them memory is never filled, as of a model that is too large for this
    machine. control: a fault that null_gpu_controls.py makes. positive: a metric that has to
    be above 0 in some step. refused_with: the run has to fail, and its output to have this pattern.
    """

    name: str
    what: str
    module: str
    config: tuple[str, str] | None
    overrides: tuple[str, ...]
    measure: str = DRIFT_METRIC
    num_steps: int = 2
    num_gpus: int = 2
    gpu_bytes: int = 16_000_000_000
    caches_memory: bool = False
    reference: str = ""
    killed_after: int = 0
    equal_to: str = ""
    script: str = ""
    has_numbers: bool = True
    control: str = ""
    positive: str = ""
    refused_with: str = ""
    limit: int = 400  # seconds

    def arguments(self, root: Path, device: str) -> list[str]:
        overrides = [override.format(device=device) for override in self.overrides]
        if self.script:
            return [*overrides_of_script(root / self.script), *overrides]
        if self.config is None:
            return overrides
        folder, name = self.config
        return ["--config-dir", str(root / "examples" / folder), "--config-name", name, *overrides]


def overrides_of_script(script: Path) -> list[str]:
    """What a training script gives the entry point, without what its caller adds and its variables
    say."""
    _, _, command = script.read_text().partition(" -m verl_like.trainer.main_ppo placement=split ")
    assert command, f"{script} has another command"
    words = shlex.split(command.replace("\\\n", " "))
    return ["placement=split", *(word for word in words if "$" not in word)]


def on_examples(
    name: str,
    what: str,
    trainer: str,
    config: tuple[str, str] | None,
    *overrides: str,
    lr: float = 2e-3,
    num_ranks: int = 1,
    **options: object,
) -> Run:
    """Three steps of a trainer on examples: sft, rm, dpo or ilql."""
    common = (
        "data.train_batch_size=64",
        f"training.optim.lr={lr}",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.device={device}",
        f"trainer.n_gpus_per_node={num_ranks}",
    )
    options = {"measure": f"{trainer}/loss", "num_steps": 3, "num_gpus": num_ranks} | options
    return Run(
        name, what, f"verl_like.trainer.main_{trainer}", config, (*common, *overrides), **options
    )


def sft(name: str, what: str, *overrides: str, **options: object) -> Run:
    own = ("data.train_files=.toy_world/answers.parquet", "model.path=.toy_world/model", *overrides)
    return on_examples(name, what, "sft", ("split_placement/config", "warm_up"), *own, **options)


def preferences(name: str, what: str, trainer: str, *overrides: str, **options: object) -> Run:
    own = (
        "data.train_files=.toy_world/pairs.jsonl",
        "data.max_length=20",
        "model.path=.toy_world/model",
        *overrides,
    )
    return on_examples(name, what, trainer, None, *own, lr=2e-4, **options)


_PPO = (
    "device={device}",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=2",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.02",  # a cache that Python builds quickly
    "ray_kwargs.ray_init.num_cpus=16",
)


def ppo(name: str, what: str, *overrides: str, num_gpus: int = 2, **options: object) -> Run:
    config = ("split_placement/config", "toy")
    micro_batches = (
        f"{role}.ppo_micro_batch_size_per_gpu=8" for role in ("actor_rollout_ref.actor", "critic")
    )
    own = (f"trainer.n_gpus_per_node={num_gpus}", *micro_batches, *overrides)
    return Run(
        name,
        what,
        "verl_like.trainer.main_ppo",
        config,
        (*_PPO, *own),
        num_gpus=num_gpus,
        **options,
    )


def detached(name: str, what: str, *overrides: str, **options: object) -> Run:
    config = ("detached/config", "toy")
    own = ("trainer.n_gpus_per_node=1", *overrides)
    return Run(name, what, "verl_like.trainer.main_detached", config, (*_PPO, *own), **options)


_SAVING = (
    "placement=colocated",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
)

_EXPERTS_BALANCED = ("model.path=.toy_world/of_experts/model", "training.router_aux_loss_coef=0.01")
_PPO_EXPERTS = (
    "actor_rollout_ref.model.path=.toy_world/of_experts/model",
    "critic.model.path=.toy_world/of_experts/model",
)

RUNS = (
    sft("sft", "fine-tuning, one rank"),
    sft(
        "sft_two_ranks",
        "fine-tuning, two ranks, zero3",
        "model.fsdp_config.strategy=zero3",
        num_ranks=2,
        reference="sft",
    ),
    sft(
        "sft_ulysses",
        "fine-tuning, two ranks that share each sequence",
        "training.ulysses_sequence_parallel_size=2",
        num_ranks=2,
        reference="sft",
    ),
    sft("sft_lora", "fine-tuning of an adapter, one rank", "model.lora_rank=8"),
    sft("sft_experts", "fine-tuning of a mixture of experts, one rank", *_EXPERTS_BALANCED),
    sft(
        "sft_expert_parallel",
        "fine-tuning of a mixture of experts, two ranks with different experts",
        *_EXPERTS_BALANCED,
        "model.fsdp_config.strategy=zero3",
        "model.fsdp_config.expert_parallel_size=2",
        num_ranks=2,
        reference="sft_experts",
    ),
    preferences("rm", "a reward model, one rank", "rm"),
    preferences("rm_two_ranks", "a reward model, two ranks", "rm", num_ranks=2, reference="rm"),
    preferences("dpo", "DPO, one rank", "dpo", "training.beta=0.12"),
    on_examples(
        "ilql",
        "ILQL, one rank",
        "ilql",
        ("ilql/config", "ilql"),
        "data.train_files=.toy_world/walks/walks.jsonl",
        "model.path=.toy_world/walks/model",
    ),
    ppo("ppo_colocated_hf", "PPO on one rank, hf engine", *_SAVING, num_gpus=1, num_steps=3),
    ppo(
        "ppo_killed",
        "the same, killed by SIGKILL after its first checkpoint, and continued",
        *_SAVING,
        num_gpus=1,
        num_steps=3,
        killed_after=1,
        equal_to="ppo_colocated_hf",
    ),
    ppo(
        "ppo_grpo_offload_hf",
        "GRPO on one rank, hf engine, everything offloaded, dynamic micro-batches, prompts once",
        "placement=colocated",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.model.enable_activation_offload=true",
        "actor_rollout_ref.actor.use_prefix_grouper=true",
        num_gpus=1,
    ),
    ppo("ppo_split_hf", "PPO split, hf engine", "actor_rollout_ref.rollout.name=hf"),
    ppo("ppo_split_vllm", "PPO split, vLLM"),
    ppo(
        "ppo_shared_memory",
        "PPO split, vLLM, weights in shared memory",
        "actor_rollout_ref.rollout.weight_transport=shared_memory",
    ),
    ppo(
        "ppo_vllm_async",
        "PPO split, vLLM in a process of its own",
        "actor_rollout_ref.rollout.name=vllm_async",
        "actor_rollout_ref.rollout.weight_transport=shared_memory",
    ),
    ppo(
        "ppo_colocated_lora",
        "PPO colocated on one rank, an adapter, vLLM that sleeps",
        "placement=colocated",
        "actor_rollout_ref.model.lora_rank=8",
        num_gpus=1,
        caches_memory=True,
    ),
    ppo(
        "ppo_experts_hf",
        "PPO split, a mixture of experts on two ranks each, R2 and expert parallelism, hf engine",
        *_PPO_EXPERTS,
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.router_replay.mode=R2",
        "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2",
        "critic.model.fsdp_config.expert_parallel_size=2",
        num_gpus=4,
    ),
    ppo(
        "ppo_experts_vllm",
        "PPO colocated on one rank, a mixture of experts, vLLM that sleeps and returns its routing",
        *_PPO_EXPERTS,
        "placement=colocated",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        num_gpus=1,
        caches_memory=True,
    ),
    ppo(
        "ppo_experts_lora",
        "the same with an adapter of the attention",
        *_PPO_EXPERTS,
        "placement=colocated",
        "actor_rollout_ref.model.lora_rank=8",
        num_gpus=1,
        caches_memory=True,
    ),
    ppo(
        "ppo_experts_shared",
        "PPO, a mixture of experts, actor on one rank, a vLLM of two ranks with different experts",
        # Each rank of the engine has rows of its vocabulary
        "actor_rollout_ref.model.path=.toy_world/of_experts/wide_model",
        "placement=pairs",
        "resource_pool_spec.actor_ref_pool=[1]",
        "resource_pool_spec.rollout_pool=[2]",
        "resource_pool_spec.critic_reward_model_pool=[1]",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.expert_parallel_size=2",
        num_gpus=4,
    ),
    detached(
        "detached_experts",
        "detached, a mixture of experts, vLLM that returns its routing",
        *_PPO_EXPERTS,
        "algorithm.rollout_correction.bypass_mode=false",
        "actor_rollout_ref.actor.router_replay.mode=R3",
    ),
    detached(
        "detached_experts_in_flight",
        "the same with `update_in_flight`, one version behind; weights come in mid-response",
        *_PPO_EXPERTS,
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "detached.update_in_flight=true",
        "trainer.max_staleness=1",
        # Longer responses, few at a time, so that some are drawn when weights come
        "data.max_response_length=16",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.total_training_steps=4",
        # One update of weights that hardly move, so that the KL divergence is drift
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-7",
        num_steps=4,
        positive="training/staleness/mixed",
        measure=KL_METRIC,
    ),
    detached(
        "detached_vllm",
        "detached, one maker and one trainer, vLLM",
        # So that the trainer's probabilities are compared
        "algorithm.rollout_correction.bypass_mode=false",
    ),
    detached(
        "detached_nccl",
        "detached GRPO, two makers and one trainer, vLLM, NCCL",
        "detached.num_makers=2",
        # One update, so that the KL divergence is drift
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.weight_transport=nccl",
        measure=KL_METRIC,
        num_gpus=3,
    ),
    ppo(
        "ppo_colocated_ipc",
        "PPO colocated on two ranks, vLLM that sleeps, CUDA IPC",
        "placement=colocated",
        "actor_rollout_ref.rollout.weight_transport=ipc",
        caches_memory=True,
    ),
    ppo(
        "ppo_nccl",
        "PPO, actor on two ranks, vLLM on a pool of its own, NCCL",
        "placement=pairs",
        "resource_pool_spec.actor_ref_pool=[2]",
        "resource_pool_spec.rollout_pool=[1]",
        "resource_pool_spec.critic_reward_model_pool=[1]",
        "actor_rollout_ref.rollout.weight_transport=nccl",
        num_gpus=4,
    ),
    ppo(
        "ppo_nccl_tensor_parallel",
        "PPO, actor on one rank, a vLLM of two ranks, NCCL",
        # Each rank of the engine has rows of its vocabulary
        "actor_rollout_ref.model.path=.toy_world/wide_model",
        "placement=pairs",
        "resource_pool_spec.actor_ref_pool=[1]",
        "resource_pool_spec.rollout_pool=[2]",
        "resource_pool_spec.critic_reward_model_pool=[1]",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.weight_transport=nccl",
        num_gpus=4,
    ),
    Run(
        "ppo_7b_split",
        "PPO of a 7B model as run_deepseek7b_llm.sh does it, split over two GPUs of 150 GB; sizes "
        "without numbers",
        "verl_like.trainer.main_ppo",
        None,
        (
            "device={device}",
            "actor_rollout_ref.model.path=.toy_world/deepseek_7b",
            "critic.model.path=.toy_world/deepseek_7b",
            "data.train_files=.toy_world/train.parquet",
            "data.val_files=.toy_world/test.parquet",
            "data.train_batch_size=16",
            "data.max_response_length=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.rollout.enforce_eager=true",  # there is nothing to capture
            # The object store would hold the bytes of the weights, of which these pages are never
            # written.
            "actor_rollout_ref.rollout.weight_transport=shared_memory",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=2",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "ray_kwargs.ray_init.num_cpus=16",
        ),
        measure="timing_s/step",
        gpu_bytes=150_000_000_000,
        caches_memory=True,
        script="examples/split_placement/run_deepseek7b_llm.sh",
        has_numbers=False,
    ),
    sft(
        "too_large",
        "control: more memory than the device has",
        gpu_bytes=12_000_000,
        caches_memory=True,
        refused_with="CUDA out of memory",
    ),
    sft(
        "wrong_device",
        "control: one tensor on the wrong device",
        control="wrong_device",
        refused_with="Expected all tensors to be on the same device",
    ),
    ppo(
        "flipped_weight",
        "control: one weight changes its sign on the way to the engine",
        "actor_rollout_ref.rollout.name=hf",
        control="flipped_weight",
        refused_with="did not arrive at rollout rank",
    ),
    ppo(
        "memory_of_another",
        "control: another process gives memory back while vLLM profiles",
        control="memory_of_another",
        refused_with="Error in memory profiling",
    ),
    detached(
        "stopped_receiver",
        "control: an engine stands still while the trainer broadcasts the weights to it",
        "actor_rollout_ref.rollout.weight_transport=nccl",
        "trainer.call_timeout_s=60",
        "trainer.total_training_steps=4",
        control="stopped_receiver",
        refused_with="actor.send_weights did not finish within 60 s",
    ),
)
