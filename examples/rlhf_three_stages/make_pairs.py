"""Stage 2a: preferences. Samples responses of the fine-tuned model and pairs right ones with wrong
ones.

    python -m examples.rlhf_three_stages.make_pairs --out folder [key=value ...]

The keys are those of the PPO run (config/ppo.yaml): its model answers its training and its
validation prompts. Each distinct wrong response to a prompt is rejected against a right one;
prompts with only right or only wrong responses give no pair. The folder then holds `train.jsonl`
and `val.jsonl`, which `main_rm` reads.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from verl_like.data.prompt_dataset import PromptDataset
from verl_like.rewards.exact_match import compute_score
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.ppo.inputs import load_dataset
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.rollout import RolloutEngine, get_rollout_engine
from verl_like.workers.weights.exports import collect_weights

SAMPLING = [
    "reward_model.enable=false",  # there is none yet
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=12",
    "actor_rollout_ref.rollout.temperature=1.7",  # more kinds of errors
]


def start_engine(config: PPOConfig) -> RolloutEngine:
    """The rollout engine in this process, with the weights of the model."""
    policy = config.actor_rollout_ref
    engine = get_rollout_engine(policy.rollout.name)(
        policy.rollout, policy.model, rank=0, world_size=1, seed=config.trainer.seed, device="cpu"
    )
    weights = AutoModelForCausalLM.from_pretrained(
        policy.model.path, dtype=torch.float32
    ).named_parameters()
    engine.load_weights(
        [collect_weights(weights, dtype=torch.float32, rank=0, world_size=1, version=0)], 0
    )
    return engine


def pairs_of(prompt: list[dict[str, str]], responses: list[str], truth: str) -> list[dict]:
    """Each distinct wrong response with a right one."""
    is_right = {text: compute_score("", text, truth) == 1 for text in responses if text.strip()}
    right = [text for text in is_right if is_right[text]]
    wrong = [text for text in is_right if not is_right[text]]
    return (
        [{"prompt": prompt, "chosen": right[0], "rejected": text} for text in wrong]
        if right
        else []
    )


def make_pairs(engine: RolloutEngine, dataset: PromptDataset) -> list[dict]:
    """The pairs of all prompts."""
    rows = list(dataset)
    prompts = dataset.collate(rows, epoch=0)
    prompts.meta_info["global_steps"] = 0
    requests = engine.rules().requests_of(prompts, "the dataset")
    engine.submit(requests)
    completions = dict(each for ended in engine.stream() for each in ended)
    token_ids = [completions[request.name].token_ids.tolist() for request in requests]
    texts = load_tokenizer(engine.model_config).batch_decode(token_ids, skip_special_tokens=True)
    of_prompts = [
        texts[start : start + engine.config.n] for start in range(0, len(texts), engine.config.n)
    ]
    return [
        pair
        for row, answers in zip(rows, of_prompts, strict=True)
        for pair in pairs_of(row["raw_prompt"], answers, row["reward_model"]["ground_truth"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the pairs")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    folder = str(Path(__file__).parent / "config")
    config = load_ppo_config([*SAMPLING, *arguments.overrides], "ppo", folder)
    engine = start_engine(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        pairs = make_pairs(engine, load_dataset(config, tokenizer, part))
        (arguments.out / f"{part}.jsonl").write_text(
            "".join(json.dumps(pair) + "\n" for pair in pairs)
        )
        print(f"{arguments.out}/{part}.jsonl: {len(pairs):,} pairs, such as {pairs[0]}")


if __name__ == "__main__":
    main()
