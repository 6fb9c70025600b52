"""Makes what ILQL and behaviour cloning learn from: random walks on a graph, with their scores, and
a tiny model.

    python -m examples.ilql.walks --out folder --seed 1

Of 16 places each has two roads that lead one way, and two places have one to the goal, a. Whoever
logged the walks took any road with the same probability, for at most eight steps. A walk that
arrives scores one point for each step that is left, and one for arriving; all others score 0. The
folder then holds `walks.jsonl`, rows that `main_ilql` reads, `best.jsonl`, the tenth of them with
the highest scores, `graph.json`, and `model/`.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PLACES = "abcdefghijklmnop"
GOAL = "a"
MAX_STEPS = 8
NUM_WALKS = 6000
VOCABULARY = ["<pad>", "<end>", ">", *PLACES]
CHAT_TEMPLATE = (
    # H>cba<end>
    "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else '<end>' }}{% endfor %}"
)

Graph = dict[str, str]
"""The places to which the roads of a place lead."""


def make_graph(seed: int) -> Graph:
    """Two roads from every place but the goal, from which all can reach it in time."""
    rng = random.Random(seed)
    starts = PLACES.replace(GOAL, "")
    while True:
        graph = {place: "".join(rng.sample(starts.replace(place, ""), 2)) for place in starts}
        for place in rng.sample(starts, 2):
            graph[place] = GOAL + graph[place][1]
        if all(best_score(graph, start) for start in starts):
            return graph


def score(graph: Graph, start: str, walk: str) -> int:
    """Of the places that a walk names after its start; what is behind the goal does not count."""
    for step, (here, there) in enumerate(zip(start + walk, walk[:MAX_STEPS], strict=False)):
        if there not in graph[here]:
            return 0
        if there == GOAL:
            return MAX_STEPS - step
    return 0


def best_score(graph: Graph, start: str) -> int:
    reached = {start}
    for step in range(MAX_STEPS):
        reached |= {there for here in reached - {GOAL} for there in graph[here]}
        if GOAL in reached:
            return MAX_STEPS - step
    return 0


def random_walk(graph: Graph, start: str, rng: random.Random) -> str:
    walk = ""
    while len(walk) < MAX_STEPS and not walk.endswith(GOAL):
        walk += rng.choice(graph[(start + walk)[-1]])
    return walk


def make_walks(graph: Graph, seed: int) -> list[dict]:
    """Rows of walks from any place."""
    rng = random.Random(seed)
    rows = []
    for _ in range(NUM_WALKS):
        start = rng.choice(list(graph))
        walk = random_walk(graph, start, rng)
        rows.append({"prompt": start, "response": walk, "score": score(graph, start, walk)})
    return rows


def write_model(folder: Path, seed: int) -> None:
    """A Llama of two layers with random weights, and a tokenizer of one token a place."""
    backend = Tokenizer(
        models.WordLevel(
            {token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,  # about 1/sqrt(hidden_size)
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--seed", type=int, required=True, help="seed of the graph, the walks and the model"
    )
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    graph = make_graph(arguments.seed)
    rows = make_walks(graph, arguments.seed)
    best = sorted(rows, key=lambda row: -row["score"])[: NUM_WALKS // 10]
    write_model(arguments.out / "model", arguments.seed)
    (arguments.out / "graph.json").write_text(json.dumps(graph))
    for name, some in (("walks", rows), ("best", best)):
        (arguments.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some)
        )
    print(f"{arguments.out}: {NUM_WALKS:,} walks, such as {rows[0]}")


if __name__ == "__main__":
    main()
