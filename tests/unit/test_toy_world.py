"""The toy world of the split placement example: its data, tokenizer, model and folder."""

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.data import PromptDataset
from verl_like.data.conversations import ConversationDataset
from verl_like.rewards import get_reward_fn

SCRIPT = Path(__file__).parents[2] / "examples" / "split_placement" / "make_toy_world.py"


def load_script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("make_toy_world", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


toy = load_script()
SMALL = toy.Settings(
    seed=3,
    num_held_out=16,
    hidden_size=32,
    num_layers=1,
    num_answers=24,
    warm_up_epochs=1,
    warm_up_batch_size=8,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything but the warm-up, which is a run of its own."""
    out = tmp_path_factory.mktemp("toy")
    toy.write_inputs(out, SMALL)
    return out


def read_rows(world: Path, split: str) -> list[dict]:
    return pq.read_table(world / f"{split}.parquet").to_pylist()


def sum_of(question: str) -> int:
    return sum(map(int, question.rstrip("=").split("+")))


def operands(row: dict) -> frozenset[int]:
    return frozenset(int(number) for number in row["prompt"][0]["content"].rstrip("=").split("+"))


def test_rows_follow_the_schema_and_state_the_right_answer(world: Path) -> None:
    for split in ("train", "test"):
        for index, row in enumerate(read_rows(world, split)):
            first, second = row["prompt"][0]["content"].removesuffix("=").split("+")
            assert row == {
                "data_source": "verl_like/arithmetic",
                "prompt": [{"role": "user", "content": f"{first}+{second}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(int(first) + int(second))},
                "extra_info": {"split": split, "index": index},
            }
            assert 10 <= int(first) <= 99 and 10 <= int(second) <= 99


def test_no_held_out_sum_is_in_train_in_either_order(world: Path) -> None:
    train, test = read_rows(world, "train"), read_rows(world, "test")
    assert len(test) == 16
    assert not {operands(row) for row in train} & {operands(row) for row in test}
    # 90 * 90 ordered pairs: every one is in train unless it is a held-out sum or the same sum the
    # other way round
    assert len(train) == 90 * 90 - sum(len(operands(row)) for row in test)
    assert len({row["prompt"][0]["content"] for row in train}) == len(train)


def test_a_careless_pupil_forgets_carries_and_nothing_else() -> None:
    rng = random.Random(0)
    for a in range(10, 100):
        for b in range(10, 100):
            assert toy.careless_sum((a, b), 0.0, rng) == str(a + b)
    assert toy.careless_sum((37, 58), 1.0, rng) == "85"  # 7+8 = 15, 3+5 = 8
    assert toy.careless_sum((91, 86), 1.0, rng) == "77"  # 9+8 = 17
    assert toy.careless_sum((55, 55), 1.0, rng) == "00"
    assert toy.careless_sum((24, 72), 1.0, rng) == "96"  # nothing to carry
    answers = {toy.careless_sum((88, 88), 0.5, rng) for _ in range(100)}
    assert answers == {"66", "76", "166", "176"}  # each of the two carries is forgotten on its own


def test_carries_are_forgotten_as_often_as_said() -> None:
    rng = random.Random(0)
    forgotten = sum(toy.careless_sum((15, 15), 0.7, rng) == "20" for _ in range(2000))
    assert forgotten / 2000 == pytest.approx(0.7, abs=0.04)  # four standard deviations


def test_the_tokenizer_has_one_token_a_character_and_gives_the_text_back(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    token_ids = tokenizer("37+58=95", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(token_ids) == list("37+58=95")
    assert tokenizer.decode(token_ids) == "37+58=95"
    answer = [
        *tokenizer("95", add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    ]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "95"
    assert tokenizer("x", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    assert len(tokenizer) == len(toy.VOCABULARY)


def test_the_chat_template_starts_the_answer_only_when_asked(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    chat = [{"role": "user", "content": "37+58="}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert asked == "<|begin_of_sentence|><|User|>37+58=<|Assistant|>"
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False) == "<|begin_of_sentence|><|User|>37+58="
    )
    answered = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "95"}], tokenize=False
    )
    assert answered == asked + "95<|end_of_sentence|>"
    with pytest.raises(Exception, match="not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Add."}], tokenize=False)


def test_the_warm_up_learns_the_answer_and_its_end_behind_the_tokens_that_the_rollout_sees(
    world: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    prompts = PromptDataset(str(world / "train.parquet"), tokenizer, max_prompt_length=12)
    prompt_of_text = {row["raw_prompt"][0]["content"]: row for row in prompts}
    answers = pq.read_table(world / "answers.parquet").to_pylist()
    learned = ConversationDataset([str(world / "answers.parquet")], tokenizer, max_length=16)
    assert len(learned) == len(answers) == 24
    for index, row in enumerate(answers):
        batch = learned.collate([index]).batch
        prompt = prompts.collate([prompt_of_text[row["prompt"]]], epoch=0).batch
        ids, mask = (
            torch.cat([batch["prompts"][0], batch["responses"][0]]),
            batch["response_mask"][0].bool(),
        )
        assert torch.equal(ids[:9], prompt["prompts"][0])
        assert tokenizer.decode(ids[1:][mask]) == row["response"] + toy.END


def test_of_the_answers_are_as_many_wrong_as_the_record_says(world: Path, tmp_path: Path) -> None:
    answers = pq.read_table(world / "answers.parquet").to_pylist()
    wrong = [row for row in answers if int(row["response"]) != sum_of(row["prompt"])]
    assert toy.write_inputs(tmp_path, SMALL) == len(wrong) / 24 > 0
    assert [row["is_right"] for row in answers] == [row not in wrong for row in answers]


def test_the_reward_of_the_data_source_is_exact_match() -> None:
    reward = get_reward_fn(toy.DATA_SOURCE)
    assert reward(toy.DATA_SOURCE, "95", "95") == 1
    assert reward(toy.DATA_SOURCE, "85", "95") == 0


def test_the_model_is_a_llama_that_loads_and_stops_at_the_end_of_sentence(world: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / "model")
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_with_experts_the_model_is_a_mixture_as_wide_as_the_llama() -> None:
    settings = dataclasses.replace(SMALL, num_experts=3)
    model = toy.make_model(settings, toy.make_tokenizer())
    assert model.config.model_type == "qwen3_moe"
    experts = model.model.layers[0].mlp.experts
    hidden = settings.hidden_size
    assert experts.gate_up_proj.shape == (3, 2 * hidden, hidden)
    assert model.config.num_experts_per_tok * hidden == 2 * hidden


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_warm_up_learns_what_the_answers_say_and_is_the_same_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Answers to five sums, in both orders, from which no carry is left out.
    settings = dataclasses.replace(
        SMALL,
        num_held_out=4090,
        forgotten_carries=0.0,
        num_answers=80,
        warm_up_epochs=15,
        learning_rate=1e-2,
    )
    first, second = (toy.make_toy_world(tmp_path / name, settings) for name in ("first", "second"))
    # What it does, and two lines of what it reached
    assert len(capfd.readouterr().out.splitlines()) == 2 * 3
    train, _ = toy.split_problems(4090, SMALL.seed)
    assert (
        first["exact_match_before_warm_up"] == 0
        and toy.exact_match(tmp_path / "first/model", train) == 1
    )
    assert first == second
    for file in (
        "world.json",
        "answers.parquet",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        assert (tmp_path / "first" / file).read_bytes() == (
            tmp_path / "second" / file
        ).read_bytes(), file


def test_of_the_warm_up_only_an_error_is_shown(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        toy.warm_up(world, dataclasses.replace(SMALL, warm_up_batch_size=0))
    printed = capfd.readouterr()
    assert "data.train_batch_size" in printed.err and not printed.out


def test_another_seed_gives_other_files(world: Path, tmp_path: Path) -> None:
    toy.write_inputs(tmp_path, dataclasses.replace(SMALL, seed=4))
    for file in ("train.parquet", "test.parquet", "answers.parquet", "model/model.safetensors"):
        assert (tmp_path / file).read_bytes() != (world / file).read_bytes(), file


def test_a_complete_world_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = {"settings": dataclasses.asdict(SMALL), "held_out_exact_match": 0.25}
    (tmp_path / "world.json").write_text(json.dumps(recorded))
    assert toy.make_toy_world(tmp_path, SMALL) == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["world.json"]
    assert "already (held-out exact match 0.250)" in capsys.readouterr().out


def test_a_folder_that_is_no_toy_world_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has no world\.json"):
        toy.make_toy_world(tmp_path, SMALL)
    assert (tmp_path / "notes.txt").read_text() == "mine"
