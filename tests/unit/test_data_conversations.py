"""Which tokens of a conversation are learned, also where a token spans the beginning of an
answer."""

from pathlib import Path

import pytest
from test_supervised import messages, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from verl_like.data.conversations import ConversationDataset, tokens_of
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol.row_ops import jagged_parts

PLAIN = (
    "{% for m in messages %}{{ 'Q: ' if m['role'] == 'user' else 'A: ' }}{{ m['content'] }}<end>{% "
    "endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
CHATML = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def tokenizer_of(
    template: str, *, trim_offsets: bool = False, metaspace: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer of words and of the space before them; with `metaspace` it puts a space before
    every text."""
    tokens = Tokenizer(models.BPE())
    space = (
        pre_tokenizers.Metaspace()
        if metaspace
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokens.pre_tokenizer, tokens.decoder = (
        space,
        decoders.Metaspace() if metaspace else decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        initial_alphabet=alphabet, special_tokens=["<start>", "<end>", "<pad>"]
    )
    tokens.train_from_iterator(
        [" Yes No", "Yes", "No", "\n\n\n", "    x", "Q: A: assistant user"] * 9, trainer
    )
    tokens.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        (PLAIN, "Yes", "<end>"),  # " Yes" is one token, and the generation prompt ends in its space
        (CHATML, "\n\nYes", "<end>\n"),  # so are three line breaks, of which it ends in the first
        (CHATML, "x\n    x\n        x", "<end>\n"),
    ],
)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_an_answer_is_learned_as_a_whole_behind_the_tokens_of_its_prompt(
    template: str, answer: str, end: str, trim_offsets: bool, tmp_path: Path
):
    tokenizer, question = (
        tokenizer_of(template, trim_offsets=trim_offsets),
        messages(("user", "No")),
    )
    row = {"prompt": question, "data_source": "sums", "reward_model": {"style": "model"}}
    prompt = PromptDataset([write_rows(tmp_path / "rows.jsonl", [row])], tokenizer)[0]["input_ids"]
    ids, learned = tokens_of(
        [*question, *messages(("assistant", answer))], 0, tokenizer, {}, "row 0"
    )
    assert ids[: len(prompt)].tolist() == prompt
    assert learned.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[learned]) == answer + end


def test_each_answer_of_a_conversation_is_learned():
    tokenizer = tokenizer_of(PLAIN)
    turns = (
        ("user", "No"),
        ("assistant", "Yes"),
        ("assistant", "No"),
        ("user", "x"),
        ("assistant", "x"),
        ("user", "Q"),
    )
    ids, learned = tokens_of(messages(*turns), 2, tokenizer, {}, "row 0")
    text = "Q: No<end>A: Yes<end>A: No<end>Q: x<end>A: x<end>Q: Q<end>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[learned]) == "No<end>x<end>"


@pytest.mark.parametrize("answer", ["response", "completion"])
def test_of_a_row_with_a_prompt_the_response_alone_is_learned(answer: str, tmp_path: Path):
    prompt = messages(("user", "No"), ("assistant", "Yes"), ("user", "x"))
    rows = [write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, answer: "No"}])]
    dataset = ConversationDataset(rows, tokenizer_of(PLAIN), max_length=30)
    responses, mask = (
        jagged_parts(dataset.collate([0]).tensors()[name])[0]
        for name in ("responses", "response_mask")
    )
    learned = responses[mask.bool()]
    assert dataset.tokenizer.decode(learned) == "No<end>"


CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "No", "response": " "}, "row 0: turn 1, the assistant's, is empty"),
        (
            {"messages": messages(("assistant", "Yes"), ("user", "x"), ("assistant", "No"))},
            "turn 0, .* answers nothing",
        ),
        (
            {
                "messages": [
                    *messages(("user", "x")),
                    {"role": "assistant", "content": None, "tool_calls": CALL},
                ]
            },
            r"field messages\[1\]\['content'\] is missing, expected a text, which beside "
            r"tool_calls may be",
        ),
        (
            {"prompt": "No", "response": "Yes", "tools": CALL},
            "field 'tools' is list .*apply_chat_template_kwargs.tools",
        ),
        (
            {"prompt": "No", "response": "Yes", "images": ["a.png"]},
            "field 'images' is list .*, expected nothing, since the models here read text alone",
        ),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(row: dict, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        ConversationDataset(
            [write_rows(tmp_path / "rows.jsonl", [row])], tokenizer_of(PLAIN), max_length=30
        )


def test_a_call_of_a_tool_is_learned_without_a_text():
    tokenizer = tokenizer_of(PLAIN.replace("<end>", "{% if m.tool_calls %}x{% endif %}<end>"))
    turns = [*messages(("user", "No")), {"role": "assistant", "content": "", "tool_calls": CALL}]
    ids, learned = tokens_of(turns, 0, tokenizer, {}, "row 0")
    assert tokenizer.decode(ids[learned]) == "x<end>"


def test_an_answer_that_the_tokenizer_reads_in_another_way_by_itself_is_refused():
    tokenizer = tokenizer_of(PLAIN, metaspace=True)
    with pytest.raises(ValueError, match="row 0: a token spans character 13 of the conversation"):
        tokens_of(messages(("user", "No"), ("assistant", "Yes")), 0, tokenizer, {}, "row 0")
