"""Which prompts are compared after each update, so that their tokens reach all experts."""

import torch

from verl_like.protocol import DataProto
from verl_like.trainer.ppo import compared_prompts
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, RouterShape

SHAPE = RouterShape(num_layers=2, num_experts=5, top_k=1)


def replica(*of_rows: list[tuple[int, int]]) -> DataProto:
    """The tokens of each row, with the expert of each layer. The last token is not among them, and
    the response has this token alone."""
    rows = [torch.tensor([*row, LAST], dtype=torch.int8)[:, :, None] for row in of_rows]
    column = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return DataProto.from_dict(tensors={ROUTED_EXPERTS: column})


LAST = (4, 4)
FIRST = ([(0, 1)], [(0, 1), (0, 1)], [(1, 1)], [(0, 0)])
"""The first four rows, which are compared in any case."""


def test_later_prompts_are_compared_if_they_reach_an_expert_that_none_before_them_reaches():
    """In the last layer that is an expert of the token before the drawn one."""
    drawn = replica(
        *FIRST,
        [(1, 0), (0, 1)],
        [(2, 4), (0, 1)],
        [(3, 1), (-1, -1)],
        [(3, 1)],
        [(4, 4)],
        [(4, 3), (0, 2)],
        [(0, 3)],
    )
    chosen, reached = compared_prompts.prompts_that_reach([drawn], 1, SHAPE)
    assert chosen == [0, 1, 2, 3, 5, 6, 8, 9, 10]
    assert reached.all() and reached.shape == (2, 5)
    said = compared_prompts.said_of_experts(len(chosen), reached)
    assert "of 9 prompts are compared" in said and said.endswith("they depend on each expert.")


def test_experts_that_are_not_reached_are_named_with_their_router():
    drawn = replica(*FIRST, [(2, 1), (4, 1), (0, 1)])
    chosen, reached = compared_prompts.prompts_that_reach([drawn], 1, SHAPE)
    assert chosen == [0, 1, 2, 3, 4]
    said = compared_prompts.said_of_experts(len(chosen), reached)
    assert said.endswith("whether their weights arrive: 3 of router 0; 2, 3, 4 of router 1.")


def test_an_expert_is_reached_if_each_replica_has_a_token_for_it():
    first = replica(*FIRST, [(2, 2)], [(3, 3)], [(4, 4)])
    other = replica(*FIRST, [(0, 0)], [(2, 2)], [(3, 3)])
    chosen, reached = compared_prompts.prompts_that_reach([first, other], 1, SHAPE)
    assert chosen == [0, 1, 2, 3, 4, 5, 6]
    assert reached.tolist() == [[True, True, True, True, False]] * 2


def test_fewer_prompts_than_are_compared_are_all_chosen():
    chosen, _reached = compared_prompts.prompts_that_reach([replica(*FIRST[:2])], 1, SHAPE)
    assert chosen == [0, 1]
