"""What people see of episodes: their records, the file of a run, the report and the command."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_worker_models import write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_like.episodes import main
from verl_like.protocol import DataProto
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.episode_records import EpisodeRecords
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.maker_driver import MakerDriver
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.workers.agents.episode import Episode, FinishedRow
from verl_like.workers.agents.turns import ToolCall, Turn

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """It has a token for each character, and puts blanks between them."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


def prompts_of(num_prompts: int, step: int, **meta_info: Any) -> DataProto:
    uids = [f"0-{number}" for number in range(num_prompts)]
    return DataProto.from_dict(
        non_tensors={"uid": uids}, meta_info={"global_steps": step} | meta_info
    )


def finished_row(
    tokenizer: PreTrainedTokenizerBase, prompt: str, parts: list[str], scores: dict[int, float]
) -> FinishedRow:
    """A row whose first part, third part and so on were drawn."""
    mask: list[int] = []
    for number, part in enumerate(parts):
        mask += [1 - number % 2] * len(part)
    scores_R = np.zeros(len(mask), np.float32)
    for place, score in scores.items():
        scores_R[place] = score
    return FinishedRow(
        prompt_ids=np.array(tokenizer.convert_tokens_to_ids(list(prompt))),
        response_ids=np.array(tokenizer.convert_tokens_to_ids(list("".join(parts)))),
        response_mask=np.array(mask),
        log_probs=np.zeros(len(mask), np.float32),
        scores=scores_R,
        versions=(),
    )


def episode(name: str = "", ended: str = "done", **fields: Any) -> Episode:
    return Episode(**{"name": name, "rows": (), "has_reward": True, "ended": ended} | fields)


def test_a_record_has_all_rows_in_text_with_what_was_drawn_and_all_turns(tokenizer):
    rows = (
        finished_row(tokenizer, "12", ["34", "567", "8"], {1: 0.25, 5: 0.5}),
        finished_row(tokenizer, "9", ["0"], {0: -2.0}),
    )
    call = ToolCall("times", "{'a': 3}", "12", 0.5)
    turns = (Turn(0, 2, 1.5, [call]), Turn(0, 1, 0.75), Turn(1, 1, 0.25))
    failures = (("deadline", "too late"),)
    given = episode(rows=rows, turns=turns, seconds=3.5, ended="room", failures=failures)
    others = [episode() for _ in range(5)]
    records = EpisodeRecords(tokenizer, num_shown=6)
    made = records.of(prompts_of(2, step=7), [*others[:4], given, *others[4:]], has_rewards=True)
    assert len(made) == 6
    (record,) = [each for each in made if each["rows"]]
    assert json.loads(json.dumps(record)) == {
        "step": 7,
        "is_validation": False,
        "uid": "0-1",
        "sample": 1,
        "ended": "room",
        "reward": 0.25 + 0.5 - 2.0,
        "failures": [["deadline", "too late"]],
        "seconds": 3.5,
        "rows": [
            [["1 2", False], ["3 4", True], ["5 6 7", False], ["8", True]],
            [["9", False], ["0", True]],
        ],
        "turns": [
            {
                "row": 0,
                "num_drawn": 2,
                "seconds": 1.5,
                "tool_calls": [
                    {
                        "name": "times",
                        "arguments": "{'a': 3}",
                        "result": "12",
                        "seconds": 0.5,
                        "is_error": False,
                    }
                ],
            },
            {"row": 0, "num_drawn": 1, "seconds": 0.75, "tool_calls": []},
            {"row": 1, "num_drawn": 1, "seconds": 0.25, "tool_calls": []},
        ],
    }


def test_an_episode_without_a_reward_of_its_own_has_none_in_its_record(tokenizer):
    rows = (finished_row(tokenizer, "1", ["2"], {0: 0.5}),)
    of_call = [
        episode(rows=rows),
        episode(rows=rows, has_reward=False),
        episode(rows=rows, has_reward=False, reward_problem="'x' is no number"),
    ]
    records = EpisodeRecords(tokenizer, num_shown=9)
    made = {each["sample"]: each for each in records.of(prompts_of(1, 1), of_call, True)}
    assert [made[sample]["reward"] for sample in range(3)] == [0.5, None, None]
    assert made[2]["failures"] == [("reward", "'x' is no number")]
    scored_by_others = EpisodeRecords(tokenizer, 1).of(prompts_of(1, 1), of_call[:1], False)
    assert scored_by_others[0]["reward"] is None


def test_of_a_step_and_of_a_validation_few_episodes_are_kept_and_as_many_that_failed(tokenizer):
    failure = (("harness", "it raised"),)
    of_call = [episode() for _ in range(20)]
    of_call += [episode(ended="failed", failures=failure) for _ in range(20)]
    records = EpisodeRecords(tokenizer, num_shown=3)

    def kept(step: int, **meta_info: Any) -> dict[bool, list[tuple[str, int]]]:
        found: dict[bool, list[tuple[str, int]]] = {False: [], True: []}
        for each in records.of(prompts_of(10, step, **meta_info), of_call, True):
            found[bool(each["failures"])].append((each["uid"], each["sample"]))
        return found

    first = kept(1)
    assert [len(first[failed]) for failed in (False, True)] == [3, 3]
    assert kept(1) == {False: [], True: []}, "another call of the step"
    validation = kept(1, validate=True)
    assert len(validation[False]) == len(validation[True]) == 3
    second = kept(2)
    assert len(second[False]) == 3 and second[False] != first[False]
    assert EpisodeRecords(tokenizer, 0).of(prompts_of(10, 1), of_call, True) == []
    assert records.of(prompts_of(0, 3), [], True) == []


@pytest.mark.parametrize("has_rewards", [True, False])
def test_a_driver_of_makers_records_the_episodes_that_it_is_told_of(tokenizer, has_rewards):
    config = load_ppo_config([*REQUIRED, "trainer.log_val_generations=2"])
    side = SideRecorder("maker_0", node="")
    driver = MakerDriver(config, tokenizer, {}, None, None, None, None, side)
    driver.maker = object.__new__(ExperienceMaker)
    driver.maker.reward_columns = {"episode_scores": 1.0} if has_rewards else {"rule_scores": 1.0}
    rows = (finished_row(tokenizer, "1", ["2"], {0: 0.5}),)
    driver.show_episodes(prompts_of(5, step=4), [episode(rows=rows)] * 5)
    assert len(side.episodes) == 2
    assert {record["reward"] for record in side.episodes} == {0.5 if has_rewards else None}


def record_of(step: int, **changes: Any) -> dict[str, Any]:
    """A record with two turns and a tool."""
    call = {"name": "times", "arguments": "3, 4", "result": "12", "seconds": 0.25}
    wrong = {"name": "plus", "arguments": "?", "result": "no number", "seconds": 0.5}
    return {
        "step": step,
        "is_validation": False,
        "uid": "3-17",
        "sample": 2,
        "ended": "done",
        "reward": 0.75,
        "failures": [],
        "seconds": 4.5,
        "rows": [
            [["what is 3 * 4\n", False], ["<call>\nnow", True], ["12", False], ["it is", True]]
        ],
        "turns": [
            {
                "row": 0,
                "num_drawn": 5,
                "seconds": 1.5,
                "tool_calls": [call | {"is_error": False}, wrong | {"is_error": True}],
            },
            {"row": 0, "num_drawn": 2, "seconds": 0.25, "tool_calls": []},
        ],
    } | changes


LINES = """# step 5, prompt 3-17, sample 2
# done, reward 0.75, 4.50 s
- turn 0, row 0: 5 tokens drawn, model 1.50 s, tools 0.75 s
= times 3, 4 -> 12
! plus ? -> no number
- turn 1, row 0: 2 tokens drawn, model 0.25 s, tools 0.00 s
- row 0
| what is 3 * 4
| 
> <call>
> now
| 12
> it is
"""


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    folder = f"trainer.default_local_dir={tmp_path}"
    return RunRecorder(load_ppo_config([*REQUIRED, folder, "trainer.logger=[]"]), PPO_DISPLAY)


def texts_of(recorder: RunRecorder) -> list[str]:
    """The text of each record's only row."""
    lines = (recorder.run_dir / "episodes.jsonl").read_text().splitlines()
    return [json.loads(line)["rows"][0][0][0] for line in lines]


def test_a_whole_short_text_is_kept_and_of_a_long_one_the_ends(recorder):
    short = "ab\ncd" * 800
    long = "e" * 3000 + "f" * 3000
    for text in (short, long):
        recorder.show_episodes([record_of(1, rows=[[(text, True)]])])
    assert texts_of(recorder) == [short, "e" * 2000 + " ... " + "f" * 2000]


def test_secrets_are_masked_before_texts_are_cut_and_control_characters_are_left_out(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JUDGE_API_KEY", "canary of the environment")
    config = load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"])
    recorder = RunRecorder(config, PPO_DISPLAY)
    cut_in_two = "a" * 1990 + "canary of the environment" + "b" * 3000
    hostile = "\x1b[2J\ud800"
    call = {"name": "read", "arguments": "canary of the environment", "result": hostile}
    turn = {"row": 0, "num_drawn": 1, "seconds": 0.5}
    turn["tool_calls"] = [call | {"seconds": 0.5, "is_error": False}]
    failures = [("harness", "its canary of the environment")]
    record = record_of(1, rows=[[(cut_in_two, False)]], turns=[turn], failures=failures)
    recorder.show_episodes([record])
    recorder.close("Done.")
    kept = (recorder.run_dir / "episodes.jsonl").read_text()
    assert "canary" not in kept and kept.count("***") == 3
    shown = (recorder.run_dir / "report.html").read_text()
    assert (
        "read *** -&gt;  [2J " in shown and "report is not written" not in capsys.readouterr().out
    )


def test_the_report_shows_the_newest_episodes_marks_what_was_drawn_and_adds_up_failures(recorder):
    for step in (4, 5):
        recorder.show_episodes([record_of(step, uid=f"{step}-<b>")])
        recorder.show_episodes([record_of(step - 3, is_validation=True)])
    for step, count in ((1, 2), (2, 3)):
        metrics = {f"agent/num_{name}": count for name in ("tool_errors/times", "failures/engine")}
        metrics["agent/num_room_used_up"] = 1
        metrics["agent/calls/mean"] = 1.5
        recorder.tracking.log(metrics, step)
    recorder.close("Done.")
    page = (recorder.run_dir / "report.html").read_text()
    section = page.split("<h2>Episodes</h2>")[1].split("<h2>")[0]
    headlines = re.findall("# (?:validation at )?step.*", section)
    assert headlines == [
        "# step 5, prompt 5-&lt;b&gt;, sample 2",
        "# validation at step 2, prompt 3-17, sample 2",
    ]
    block = section.split("sample 2\n")[1].split("\n\n")[0]
    without_marks = re.sub("</?mark>", "", block)
    without_headline = LINES.partition("\n")[2]
    assert without_marks + "\n" == html.escape(without_headline)
    assert re.findall("<mark>(.*?)</mark>", block) == [
        "&gt; &lt;call&gt;",
        "&gt; now",
        "&gt; it is",
    ]
    rows = [re.sub("<[^>]*>", "|", row) for row in section.split("<tr>")[2:]]
    assert [row.split("||")[:3] for row in rows] == [
        ["|Failures of the policy", "agent/num_room_used_up", "2"],
        ["|Failures of tools", "agent/num_tool_errors/times", "5"],
        ["|Failures of the infrastructure", "agent/num_failures/engine", "5"],
    ]


def test_a_run_without_agents_has_no_section_of_episodes(recorder):
    recorder.close("Done.")
    assert "Episodes" not in (recorder.run_dir / "report.html").read_text()
    assert (recorder.run_dir / "episodes.jsonl").read_text() == ""


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def test_the_command_shows_the_newest_episodes_of_a_run_that_goes_on(recorder, capsys):
    recorder.show_episodes([record_of(3), record_of(2, is_validation=True)])
    recorder.show_episodes([record_of(5), record_of(5, sample=1)])
    recorder.show_episodes([record_of(1, is_validation=True, reward=None)])
    recorder.episodes_file.write('{"step": 9, "is_val\n[]\n{"step": 6}\n' + "[" * 100_000)
    printed = shown(capsys, recorder.run_dir)
    assert re.findall("# .*step.*", printed) == [
        "# step 5, prompt 3-17, sample 2",
        "# step 5, prompt 3-17, sample 1",
        "# validation at step 2, prompt 3-17, sample 2",
        "# validation at step 1, prompt 3-17, sample 2",
    ]
    assert LINES in printed and "# done, reward None, 4.50 s\n" in printed


def test_the_command_shows_those_of_a_step_or_those_that_failed(recorder, capsys):
    failed = {"ended": "failed", "failures": [["engine", "dead\nend"]], "rows": [], "turns": []}
    recorder.show_episodes([record_of(3), record_of(3, **failed), record_of(3, is_validation=True)])
    recorder.show_episodes([record_of(8, reward=0.5)])
    steps = re.compile("# .*step (.)")
    assert steps.findall(shown(capsys, recorder.run_dir, "--step", 3)) == ["3", "3", "3"]
    printed = shown(capsys, recorder.run_dir, "--failed")
    assert steps.findall(printed) == ["3"] and "! engine: dead\n! end\n" in printed
    said = refusal(capsys, recorder.run_dir, "--step", 8, "--failed")
    assert "no such episode yet" in said and "Leave out --step and --failed" in said


def test_text_of_models_and_tools_cannot_change_the_terminal(recorder, capsys):
    record = record_of(1, uid="\x1b[2J", rows=[[["\x1b[31m", True]]])
    recorder.episodes_file.write(json.dumps(record) + "\n")  # as somebody else may write it
    printed = shown(capsys, recorder.run_dir)
    assert "\x1b" not in printed and ">  [31m\n" in printed


def test_what_is_no_folder_of_a_run_with_episodes_is_refused_with_what_to_do(tmp_path, capsys):
    said = refusal(capsys, tmp_path / "none")
    assert f"{tmp_path}/none/episodes.jsonl cannot be read" in said and "give the folder" in said
    os.mkfifo(tmp_path / "episodes.jsonl")
    assert "is not a regular file" in refusal(capsys, tmp_path)
    (tmp_path / "episodes.jsonl").unlink()
    (tmp_path / "episodes.jsonl").touch()
    assert "no such episode yet: a run with agents" in refusal(capsys, tmp_path)


def test_the_command_ends_quietly_where_nobody_reads_on(recorder):
    recorder.show_episodes([record_of(1, rows=[[["a\n" * 2000, True]] * 500])])
    command = [sys.executable, "-m", "verl_like.episodes", str(recorder.run_dir)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout and started.stderr
        assert started.stdout.readline() == "# step 1, prompt 3-17, sample 2\n"
        started.stdout.close()
        assert started.stderr.read() == ""
        assert started.wait(240) != 0
