"""The page that shows runs over each other, from folders that the record of a run has written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_like.compare.__main__ import main
from verl_like.compare.run_folder import read_runs
from verl_like.single_controller import CallEvent
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.supervised.display import SFT_DISPLAY

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
SCRIPT = "--><script>alert(1)</script>"
HOSTILE = f"{SCRIPT} $\\frac{{$ \x1b[2J \ud800"
"""A name with markup, mathematics that does not parse, control characters and half a character."""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., RunRecorder]]:
    """Begins a run in a folder below `parent`."""
    begun: list[RunRecorder] = []

    def of_config(config: RunConfig, display: Display) -> RunRecorder:
        begun.append(RunRecorder(config, display))
        return begun[-1]

    def begin_run(parent: str, *overrides: str) -> RunRecorder:
        folder = f"trainer.default_local_dir={tmp_path / parent}"
        return of_config(load_ppo_config([*REQUIRED, folder, *overrides]), PPO_DISPLAY)

    begin_run.of_config = of_config
    yield begin_run
    for recorder in begun:
        recorder.console.close()
        recorder.lock.close()


def do_steps(recorder: RunRecorder, rewards: list[float], **metrics: float) -> None:
    """Records a step for each of the rewards, with an update that takes as many seconds as its
    number."""
    for step, reward in enumerate(rewards, 1):
        with recorder.step(step, len(rewards)) as log:
            started = 100.0 * step
            recorder.record(
                CallEvent("pool", "actor", "update_actor", 0, started, started + 0.5 * step)
            )
            log({"critic/score/mean": reward, **metrics})


def compare(tmp_path: Path, *arguments: object) -> str:
    """The page that the command writes."""
    out = tmp_path / "page.html"
    words = [str(argument) for argument in arguments]
    assert main([*words, "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says when it refuses."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("verl_like: ") and said.count("\n") == 1
    return said


def captions(page: str) -> list[str]:
    """The metrics of the charts."""
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def chart_of(page: str, metric: str) -> str:
    """The chart of a metric."""
    return page.split(f"<figcaption>{metric}</figcaption>")[1].split("</figure>")[0]


def colors_of_curves(chart: str) -> list[str]:
    """The colors of the curves in a chart, each once."""
    return list(
        dict.fromkeys(re.findall(r"fill: none; stroke: (#\w{6}); stroke-width: 1.4", chart))
    )


def points_of(chart: str, color: str) -> list[tuple[float, float]]:
    """Where a curve has its points, in points of the drawing."""
    path = re.search(rf'd="([^"]*)" [^>]*fill: none; stroke: {color}; stroke-width: 1.4', chart)
    found = re.findall(r"[ML] (\S+) (\S+)", path[1])
    return [(float(x), float(y)) for x, y in found]


def test_each_run_has_a_color_and_the_curves_of_a_metric_are_in_one_chart(tmp_path, begin):
    first = begin("a")
    do_steps(first, [0.0, 0.5, 1.0])
    second = begin("b")
    do_steps(second, [0.0, 0.25])
    page = compare(tmp_path, first.run_dir, second.run_dir)
    legend = page.split('<div class="legend">')[1].split("</div>")[0]
    blue, orange = re.findall(r"background:(#\w+)", legend)
    assert blue != orange
    chart = chart_of(page, "critic/score/mean")
    assert colors_of_curves(chart) == [blue, orange]
    of_first = points_of(chart, blue)
    of_second = points_of(chart, orange)
    assert [len(of_first), len(of_second)] == [3, 2]
    assert of_first[0] == of_second[0], "both begin with step 1 and a reward of 0"
    assert of_first[1][0] == of_second[1][0], "the steps have one scale"
    heights = [of_first[0][1] - y for _, y in (of_first[1], of_second[1])]
    assert heights[0] == pytest.approx(2 * heights[1], rel=1e-3)


def test_the_page_needs_no_other_file(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.5])
    page = compare(tmp_path, recorder.run_dir)
    assert "<svg" in page and "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']https?://""", page)
    assert "default-src 'none'" in page


def test_a_metric_of_some_runs_is_shown_with_those(tmp_path, begin):
    first = begin("a")
    do_steps(first, [0.5, 0.6])
    second = begin("b")
    do_steps(second, [0.5, 0.7], **{"actor/entropy": 1.5})
    page = compare(tmp_path, first.run_dir, second.run_dir)
    assert len(colors_of_curves(chart_of(page, "critic/score/mean"))) == 2
    assert colors_of_curves(chart_of(page, "actor/entropy")) == ["#ff7f0e"]


def test_metrics_that_the_report_does_not_show_are_shown_where_a_pattern_names_them(
    tmp_path, begin, capsys
):
    recorder = begin("a")
    do_steps(recorder, [0.5], **{"own/first": 1.0, "own/second": 2.0, "other": 3.0})
    assert not {"own/first", "other"} & {*captions(compare(tmp_path, recorder.run_dir))}
    page = compare(tmp_path, recorder.run_dir, "--metrics", "own/*", "later/*")
    assert captions(page)[-2:] == ["own/first", "own/second"]
    assert capsys.readouterr().err == "verl_like: no run has a metric like later/* yet.\n"


def test_runs_of_different_trainers_are_compared(tmp_path, begin):
    ppo = begin("ppo")
    do_steps(ppo, [0.5])
    own = ["data.train_files=t", "model.path=m", "training.optim.lr=1e-2"]
    sft_config = load_config(
        SFTConfig, broken_supervised_rules, [*own, f"trainer.default_local_dir={tmp_path / 'sft'}"]
    )
    sft = begin.of_config(sft_config, SFT_DISPLAY)
    with sft.step(1, 2) as log:
        log({"sft/loss": 2.5})
    detached_config = load_config(
        DetachedConfig,
        broken_detached_rules,
        [
            *REQUIRED,
            *("device=cpu", "placement=detached"),
            f"trainer.default_local_dir={tmp_path / 'detached'}",
        ],
    )
    detached = begin.of_config(detached_config, PPO_DISPLAY)
    detached.tracking.log({"critic/score/mean": 0.25}, 1)
    page = compare(tmp_path, ppo.run_dir, sft.run_dir, detached.run_dir)
    assert colors_of_curves(chart_of(page, "critic/score/mean")) == ["#1f77b4", "#2ca02c"]
    assert colors_of_curves(chart_of(page, "sft/loss")) == ["#ff7f0e"]
    assert len(colors_of_curves(chart_of(page, "timing_s/step"))) == 2
    of_all, of_some = page.split("<h2>Configuration</h2>")[1].split("<details>")
    assert "<td>trainer.experiment_name</td><td>ppo</td><td>sft</td><td>detached</td>" in of_all
    assert "<td>algorithm.lam</td>" in of_some and "<td>algorithm.lam</td>" not in of_all


def test_only_keys_with_different_values_are_in_the_table_and_secrets_are_masked(
    tmp_path, begin, monkeypatch
):
    secret = "canary of this test"
    monkeypatch.setenv("OWN_VARIABLE_TOKEN", secret)
    given = "+custom_reward_function.reward_kwargs.judge={url: 'http://user:canary@host/%s', api_key: canary%s}"
    function = "custom_reward_function.path=r.py"
    recorders = [
        begin(f"run_{number}", f"trainer.seed={number}", function, given % (number, number))
        for number in (1, 2)
    ]
    # A secret that somebody wrote into the file of a run
    config = OmegaConf.load(recorders[0].run_dir / "config.yaml")
    config.custom_reward_function.reward_kwargs.judge.api_key = secret
    OmegaConf.save(config, recorders[0].run_dir / "config.yaml")
    page = compare(tmp_path, *(recorder.run_dir for recorder in recorders))
    assert "<td>trainer.seed</td><td>1</td><td>2</td>" in page
    assert "trainer.total_epochs" not in page
    assert "canary" not in page and "http://***@host/1" in page


def test_generations_of_one_prompt_stand_next_to_each_other(tmp_path, begin):
    recorders = [begin(name) for name in "ab"]
    for recorder, answer in zip(recorders, ("four", "five"), strict=True):
        for step in (0, 2):
            recorder.show_generations(
                step,
                1,
                lambda row, step=step, answer=answer: {
                    "prompt": "2 + 2?",
                    "response": f"{answer} {step}",
                    "score": "1.00",
                },
                num_shown=1,
            )
    recorders[0].show_generations(4, 1, lambda row: {"prompt": "3 + 3?", "response": "six"}, 1)
    page = compare(tmp_path, *(recorder.run_dir for recorder in recorders))
    section = page.split("<h2>Generations</h2>")[1].split("<h2>Configuration</h2>")[0]
    shared, of_one = section.split("3 + 3?")
    rows = re.findall(r"<tr><td>(\d+)</td>(.*?)</tr>", shared, re.DOTALL)
    assert [step for step, _ in rows] == ["0", "2"]
    for step, cells in rows:
        left, right = cells.removesuffix("</td>").split("</td>")
        assert f"<b>response</b> four {step}\n<b>score</b> 1.00" in left
        assert f"<b>response</b> five {step}\n<b>score</b> 1.00" in right
    assert "2 + 2?" in shared, "what more runs have comes first"
    assert "six" in of_one and of_one.count('<td class="generation"></td>') == 1


def test_a_long_record_of_generations_is_shown_in_part(tmp_path, begin):
    recorder = begin("a")
    for step in range(30):
        recorder.show_generations(
            step, 1, lambda row, step=step: {"prompt": f"prompt {step}", "response": "x"}, 1
        )
    page = compare(tmp_path, recorder.run_dir)
    assert "prompt 29<" in page and "prompt 9<" not in page
    assert "10 further prompts are in generations.jsonl" in page


def test_timelines_have_one_scale_and_show_the_last_complete_step_that_did_not_validate(
    tmp_path, begin
):
    recorders = [begin(name) for name in "ab"]
    do_steps(recorders[0], [0.5] * 3)  # of step 3 more calls may come
    do_steps(recorders[1], [0.5] * 6)
    with recorders[1].validation():
        recorders[1].record(CallEvent("pool", "rollout", "generate_sequences", 0, 601.0, 601.5))
    with recorders[1].step(7, 9) as log:
        recorders[1].record(CallEvent("pool", "actor", "update_actor", 0, 700.0, 700.5))
        log({})
    runs = read_runs([recorder.run_dir for recorder in recorders])
    assert [{call["step"] for call in run.calls} for run in runs] == [{2}, {5}]
    page = compare(tmp_path, *(recorder.run_dir for recorder in recorders))
    drawn = page.split("<h2>Timelines</h2>")[1].split("<h2>")[0]
    assert drawn.count("<svg") == 1 and "<!--  step 2 -->" in drawn and "<!--  step 5 -->" in drawn
    bars = re.findall(
        r'd="M (\S+) \S+ \nL (\S+) \S+ \n[^"]*z\n" clip-path[^>]*fill: #1f77b4', drawn
    )
    starts = [float(left) for left, _ in bars]
    lengths = [float(right) - float(left) for left, right in bars]
    assert starts[0] == starts[1]
    assert lengths[1] / lengths[0] == pytest.approx(2.5 / 1.0, rel=1e-3)


def test_no_text_of_data_or_model_becomes_markup(tmp_path, begin):
    recorder = begin("a", f"trainer.experiment_name='{SCRIPT}'")
    recorder.log_validation({f"val-core/{HOSTILE}/acc": 0.5})
    do_steps(recorder, [0.5, 0.5], **{f"own/{HOSTILE}": 1.0})
    for step in (3, 4):
        with recorder.step(step, 4) as log:
            recorder.record(CallEvent(HOSTILE, "actor", f"update_{HOSTILE}", 0, 1.0, 2.0))
            log({})
    row = {"prompt": HOSTILE, "response": HOSTILE, HOSTILE: HOSTILE}
    recorder.show_generations(4, 1, lambda _: row, num_shown=1)
    other = begin("b", f"trainer.project_name='{SCRIPT}'")
    page = compare(tmp_path, recorder.run_dir, other.run_dir, "--metrics", "own/*")
    assert "<script" not in page.lower() and "\x1b" not in page
    without_comments = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    assert "alert(1)" in without_comments and "-->" not in without_comments.split("<h2>Runs")[0]
    assert "--&gt;&lt;script&gt;" in page and len(captions(page)) == 5


def test_a_run_that_has_just_begun_has_no_step_yet(tmp_path, begin):
    first = begin("a")
    page = compare(tmp_path, first.run_dir)
    assert "<td>no step yet</td>" in page and "<svg" not in page
    second = begin("b", "trainer.total_training_steps=7")
    do_steps(second, [0.5, 0.5])
    page = compare(tmp_path, first.run_dir, second.run_dir)
    assert "<td>no step yet</td>" in page and "<td>2 of 7</td>" in page
    (first.run_dir / "metrics.jsonl").unlink()
    (first.run_dir / "timeline.jsonl").unlink()
    (first.run_dir / "generations.jsonl").unlink()
    assert "<td>no step yet</td>" in compare(tmp_path, first.run_dir)


def test_a_line_that_is_half_written_is_left_out_until_it_is_whole(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.25, 0.5])
    recorder.show_generations(2, 1, lambda row: {"prompt": "p", "response": "r"}, num_shown=1)
    (whole,) = read_runs([recorder.run_dir])
    for name in ("metrics.jsonl", "timeline.jsonl", "generations.jsonl"):
        file = recorder.run_dir / name
        line = file.read_bytes().splitlines()[-1].replace(b'"step": 2', b'"step": 3')
        for length in (1, len(line) // 2, len(line) - 1):
            written = file.read_bytes()
            file.write_bytes(written + line[:length])
            (found,) = read_runs([recorder.run_dir])
            assert (found.metrics, found.calls) == (whole.metrics, whole.calls)
            assert found.generations == whole.generations
            file.write_bytes(written)
    with open(recorder.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "critic/score/mean": 0.75}')
    assert read_runs([recorder.run_dir])[0].steps.startswith("3")


def test_values_that_are_no_finite_numbers_are_no_points(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.5, float("nan"), float("inf"), 1.0])
    rows = [
        '{"step": 5, "critic/score/mean": NaN}',
        '{"step": 6, "critic/score/mean": -Infinity}',
        '{"step": 7, "critic/score/mean": "high"}',
        '{"step": 8, "critic/score/mean": true}',
        '{"step": 9, "critic/score/mean": 1' + "0" * 400 + "}",
        '{"step": null, "critic/score/mean": 0.5}',
        '{"step": 10, "critic/score/mean": [1]}',
    ]
    with open(recorder.run_dir / "metrics.jsonl", "a") as file:
        file.write("\n".join(rows))
    page = compare(tmp_path, recorder.run_dir)
    assert len(points_of(chart_of(page, "critic/score/mean"), "#1f77b4")) == 2


def test_the_greatest_numbers_that_are_shown_can_be_drawn(tmp_path, begin):
    recorder = begin("a")
    with open(recorder.run_dir / "metrics.jsonl", "w") as file:
        for step, value in enumerate((1.7e298, -1.7e298, 0.0, 1.7e308)):
            file.write(json.dumps({"step": step, "critic/score/mean": value}) + "\n")
    chart = chart_of(compare(tmp_path, recorder.run_dir), "critic/score/mean")
    assert len(points_of(chart, "#1f77b4")) == 3


def test_damaged_rows_of_every_file_cost_those_rows_alone(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.25, 0.5])
    damaged = ["[1]", "null", "[" * 100_000, '{"step": 1, "method"', "\\xff", '{"step": [1]}']
    damaged += ['{"step": 1, "pool": 1, "process": 2, "method": 3, "started": "a"}']
    for name in ("metrics.jsonl", "timeline.jsonl", "generations.jsonl"):
        file = recorder.run_dir / name
        file.write_bytes(
            b"\n".join([line.encode() for line in damaged]) + b"\n\xff\n" + file.read_bytes()
        )
    (run,) = read_runs([recorder.run_dir])
    rewards = [row.get("critic/score/mean") for row in run.metrics]
    assert [reward for reward in rewards if reward is not None] == [0.25, 0.5]
    assert len(run.calls) == 1 and run.generations == []
    compare(tmp_path, recorder.run_dir)


def test_what_is_no_folder_of_a_run_is_refused(tmp_path, begin, capsys):
    recorder = begin("a")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "a"):
        said = refusal(capsys, recorder.run_dir, path)
        assert f"{path} is no folder of a run" in said


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path, begin, capsys):
    recorder = begin("a")
    do_steps(recorder, [0.5])
    recorder.close("Done.")
    capsys.readouterr()
    for name in ("metrics.jsonl", "timeline.jsonl", "generations.jsonl", "config.yaml"):
        file = recorder.run_dir / name
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        assert f"{file} is not a regular file" in refusal(capsys, recorder.run_dir)
        file.unlink()
        file.write_bytes(content)
    (recorder.run_dir / "config.yaml").write_text("a: [")
    assert "config.yaml is not YAML that a run writes" in refusal(capsys, recorder.run_dir)


def test_a_run_that_is_given_twice_is_refused(tmp_path, begin, capsys):
    recorder = begin("a")
    latest = tmp_path / "a" / "latest"
    assert f"{latest} is given twice" in refusal(capsys, recorder.run_dir, latest)


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path, begin):
    recorders = [begin(name) for name in "ab"]
    for name, recorder in zip("ab", recorders, strict=True):
        recorder.run_dir.rename(tmp_path / name / "run")
    page = compare(tmp_path, tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert "<title>Comparison of a/run, b/run</title>" in page
    assert "<title>Comparison of run</title>" in compare(tmp_path, tmp_path / "a" / "run")


def test_the_link_to_the_newest_run_stands_for_that_run(tmp_path, begin):
    recorder = begin("a")
    assert f"Comparison of {recorder.run_dir.name}<" in compare(tmp_path, tmp_path / "a/latest")


def test_more_runs_than_matplotlib_has_colors_have_different_ones(tmp_path, begin):
    recorders = [begin(f"run_{number}", "trainer.logger=[]") for number in range(12)]
    page = compare(tmp_path, *(recorder.run_dir for recorder in recorders))
    assert len(set(re.findall(r"background:(#\w{6})", page))) == 12


def test_a_page_that_cannot_be_written_is_refused_and_none_is_written_into_a_run(
    tmp_path, begin, capsys
):
    recorder = begin("a")
    said = refusal(capsys, recorder.run_dir, "--out", tmp_path / "none" / "page.html")
    assert "page.html cannot be written" in said
    said = refusal(capsys, recorder.run_dir, "--out", recorder.run_dir / "page.html")
    assert "is in the folder of a run" in said


def test_comparing_changes_nothing_in_a_run(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.5, 0.75])
    recorder.show_generations(2, 1, lambda row: {"prompt": "p", "response": "r"}, num_shown=1)

    def state() -> dict[str, tuple[bytes, int]]:
        files = [path for path in recorder.run_dir.rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = state()
    compare(tmp_path, recorder.run_dir)
    assert state() == before


def test_the_command_writes_into_the_present_folder_and_says_where(
    tmp_path, begin, monkeypatch, capsys
):
    recorder = begin("a")
    do_steps(recorder, [0.5])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main([str(recorder.run_dir)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{tmp_path}/compare.html\n", "")
    assert "critic/score/mean" in (tmp_path / "compare.html").read_text()


@pytest.mark.proof
def test_the_command_runs_in_a_process_of_its_own(tmp_path, begin):
    recorder = begin("a")
    do_steps(recorder, [0.5])
    command = [sys.executable, "-m", "verl_like.compare", str(recorder.run_dir)]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/compare.html\n"
    assert "critic/score/mean" in (tmp_path / "compare.html").read_text()
