"""The exact mean score of each policy over all starts, and the mean over the seeds: a table."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from examples.ilql.walks import GOAL, MAX_STEPS, PLACES, VOCABULARY, Graph, best_score
from verl_like.workers.models.ilql import AdvantageWeighting

BETA = 4.0
Policy = Callable[[list[str]], torch.Tensor]
"""The probability of every token after each of n texts of the same length, (n, V)."""


def policy_of(folder: Path, beta: float) -> Policy:
    """Of an exported model; `beta` is the weight of the advantages, 0 needs no Q and V."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    weighting = AdvantageWeighting(model, beta) if beta else None

    @torch.no_grad()
    def policy(texts: list[str]) -> torch.Tensor:
        ids = torch.tensor([[VOCABULARY.index(character) for character in text] for text in texts])
        logits = model(ids).logits[:, -1]
        return (weighting(ids, logits) if weighting else logits).softmax(-1)

    return policy


def mean_score(graph: Graph, policy: Policy) -> float:
    """Over all starts: every walk by its probability, one step at a time; what is no road leads to
    the score 0."""
    walks = {f"{start}>": 1 / len(graph) for start in graph}
    total = 0.0
    for step in range(MAX_STEPS):
        probabilities = policy(list(walks))
        longer: dict[str, float] = {}
        for (walk, probability), of_tokens in zip(
            walks.items(), probabilities.tolist(), strict=True
        ):
            for there in graph[walk.replace(">", "")[-1]]:
                arriving = probability * of_tokens[VOCABULARY.index(there)]
                if there == GOAL:
                    total += arriving * (MAX_STEPS - step)
                else:
                    longer[walk + there] = arriving
        walks = longer
    return total


def uniform(graph: Graph) -> Policy:
    """Of those who logged the walks."""

    def policy(texts: list[str]) -> torch.Tensor:
        roads = [graph[text.replace(">", "")[-1]] for text in texts]
        return torch.tensor(
            [[(token in PLACES and token in road) / 2 for token in VOCABULARY] for road in roads]
        )

    return policy


def scores(folder: Path) -> dict[str, float]:
    """Of the runs in the folder of a seed."""
    graph = json.loads((folder / "graph.json").read_text())
    ilql, best = (
        next((folder / name / "latest").glob("global_step_*/model/huggingface"))
        for name in ("ilql", "best")
    )
    return {
        "logged": mean_score(graph, uniform(graph)),
        "cloned": mean_score(graph, policy_of(ilql, 0.0)),
        "best tenth cloned": mean_score(graph, policy_of(best, 0.0)),
        "ILQL": mean_score(graph, policy_of(ilql, BETA)),
        "optimum": sum(best_score(graph, start) for start in graph) / len(graph),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="of each seed")
    transformers.logging.disable_progress_bar()
    rows = {folder.name: scores(folder) for folder in parser.parse_args().folders}
    rows["mean"] = {
        name: sum(row[name] for row in rows.values()) / len(rows)
        for name in next(iter(rows.values()))
    }
    print("\n" + "".join(f"{name:>19}" for name in ("seed", *rows["mean"])))
    for name, row in rows.items():
        print(f"{name:>19}" + "".join(f"{value:19.3f}" for value in row.values()))


if __name__ == "__main__":
    main()
