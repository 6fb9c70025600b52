"""The bare loop beside the class way: one process that plays all episodes on an event loop, with
the class in it, and records nothing."""

import asyncio
import json
import re
import time
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.serve import serve
from benchmarks.sides import agents_world as world
from examples.agents.calculator import Calculator
from examples.agents.make_world import END

CALL = re.compile("<tool_call>(.*?)</tool_call>")
state: dict[str, Any] = {}


def start(folder: str, num_prompts: int, num_samples: int, num_turns: int) -> dict[str, Any]:
    state["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(f"{folder}/model")
    state["script"] = world.Script(f"{folder}/model", num_turns)
    state["tools"] = world.tools()
    state["rows"] = [row for row in world.rows(num_prompts) for _ in range(num_samples)]
    return {}


def rendered(messages: list[dict[str, Any]], is_prompt: bool) -> str:
    return state["tokenizer"].apply_chat_template(
        messages, tools=state["tools"], tokenize=False, add_generation_prompt=is_prompt
    )


def tokens(text: str) -> list[int]:
    return state["tokenizer"].encode(text, add_special_tokens=False)


async def episode(row: dict[str, Any]) -> tuple[list[int], list[int], float]:
    """The tokens behind the prompt, which of them were drawn, and the reward."""
    environment = Calculator()
    environment.reset(**row)
    messages = list(row["prompt"])
    prompt = tokens(rendered(messages, is_prompt=True))
    response: list[int] = []
    mask: list[int] = []
    while True:
        await asyncio.sleep(0)
        drawn = state["script"].drawn(prompt + response)
        response += drawn
        mask += [1] * len(drawn)
        text = state["tokenizer"].decode(drawn)
        functions = [json.loads(call) for call in CALL.findall(text)]
        if not functions:
            return response, mask, environment.get_reward()
        calls = [{"type": "function", "function": function} for function in functions]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        before = rendered(messages, is_prompt=False)
        for function in functions:
            result = getattr(environment, function["name"])(**function["arguments"])
            messages.append({"role": "tool", "name": function["name"], "content": str(result)})
        place = before.rindex(END) + len(END)
        inserted = tokens(rendered(messages, is_prompt=True)[place:])
        response += inserted
        mask += [0] * len(inserted)


async def all_episodes() -> list[tuple[list[int], list[int], float]]:
    return await asyncio.gather(*[episode(row) for row in state["rows"]])


def run() -> dict[str, Any]:
    """All episodes: their tokens, masks and scores, and the CPU seconds."""
    before = time.process_time()
    played = asyncio.run(all_episodes())
    cpu = time.process_time() - before
    responses, masks, rewards = zip(*played, strict=True)
    return {
        "cpu": {"loop": cpu},
        "responses": np.concatenate(responses),
        "response_mask": np.concatenate(masks),
        "rewards": np.array(rewards),
    }


if __name__ == "__main__":
    serve(start, run)
