"""The comparisons of `rllm_lightning.lab.speed`: that both sides do the same work, and what the tables say. Never how long it takes."""

import importlib.util
import io
import json
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rllm_lightning.lab.speed import advantage, harness, machine, rollout, step, train
from rllm_lightning.lab.speed.report import Column, Report
from rllm_lightning.lab.speed.step import StepRun
from rllm_lightning.lab.speed.timing import Timing, Variant, take_turns
from rllm_lightning.lab.speed.workload import Counts, Sampler, Size, as_chats, load, questions
from rllm_lightning.tracking.episode_logger import read_episodes

MINI = Counts(num_prompts=2, num_samples=2, max_tokens=3)
BENCHMARK = Path(__file__).parents[2] / "experiments" / "benchmark.py"


@pytest.fixture(scope="module")
def tiny():
    return load("builtin:tiny")


@pytest.fixture
def benchmark():
    """`main(argv)` of experiments/benchmark.py."""
    spec = importlib.util.spec_from_file_location("benchmark_command", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------- timing


def test_variants_take_turns_after_a_round_that_does_not_count():
    calls = []
    variants = [Variant(name, lambda number, name=name: calls.append((name, number)) or 6.0) for name in "ab"]
    timings = take_turns(variants, repeats=2)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]
    assert timings["a"].work == [6.0, 6.0]


def test_a_rate_is_the_median_of_the_rounds_rates():
    """10/1, 30/2 and 10/5 a second: 10, 15 and 2; the median is 10, that of the seconds 2."""
    timing = Timing(seconds=[1.0, 2.0, 5.0], work=[10.0, 30.0, 10.0])
    assert (timing.median_s, timing.rate) == (2.0, 10.0)


# ------------------------------------------------------------------------------------------------------------------- advantage


@pytest.mark.parametrize("name", advantage.LOOPS)
def test_a_loop_gives_what_the_estimator_gives(name):
    rewards, lengths = advantage.batch(400, 8)
    mixed = [group for group, r in enumerate(rewards) if 0 < r.sum() < 8]  # equal rewards divide by a small epsilon in both
    rewards, lengths = [rewards[g] for g in mixed], [lengths[g] for g in mixed]
    expected = advantage.advantages_of(dict(advantage.measurable())[name], rewards, lengths)
    np.testing.assert_allclose(advantage.looped(advantage.LOOPS[name], rewards, lengths), expected, rtol=1e-9, atol=1e-12)


def test_every_estimator_of_one_reward_is_measured():
    """All but those that need more than a reward and a length (and a state), or give no number a trajectory."""
    (report,) = advantage.measure(num_trajectories=64, repeats=1)
    left_out = {"distill", "gae", "gdpo", "gigpo", "remax", "turn_level"}
    assert {row["variant"] for row in report.rows} == set(advantage.ESTIMATORS.names()) - left_out
    assert {row["variant"] for row in report.rows if "ratio" in row} == set(advantage.LOOPS)


# --------------------------------------------------------------------------------------------------------------------- rollout


def test_tokens_of_generate_are_counted_up_to_the_first_stop_token(tiny):
    """Stop tokens 4 and 0: rows of 2 (with the stop), 4 (none) and 1 tokens."""
    generate = rollout.Generate(*tiny, MINI)
    generate.stop_ids = [0, 4]
    assert generate.num_sampled(torch.tensor([[7, 4, 9, 4], [7, 7, 7, 7], [0, 0, 0, 0]])) == 7


def test_generate_and_our_engine_answer_the_same_prompts(tiny):
    """Greedy, so that both give the same tokens; the pads to the left and their mask are right then."""
    model, tokenizer = tiny
    generate = rollout.Generate(model, tokenizer, MINI)
    new = model.generate(
        input_ids=generate.input_ids,
        attention_mask=generate.attention_mask,
        do_sample=False,
        max_new_tokens=3,
        min_new_tokens=3,
        pad_token_id=generate.pad_id,
    )[:, generate.input_ids.shape[1] :]
    sampler = Sampler(model, tokenizer, max_tokens=3)
    sampler.engine.setup.train = sampler.engine.setup.train.with_overrides(temperature=0.0)
    outputs = sampler.answers(as_chats(questions(2)), 2, 0)
    sampler.close()
    assert [output.prompt_ids for output in outputs] == [
        ids[mask.bool()].tolist() for ids, mask in zip(generate.input_ids, generate.attention_mask, strict=True)
    ]
    assert [row[: len(output.completion_ids)].tolist() for row, output in zip(new, outputs, strict=True)] == [
        output.completion_ids for output in outputs
    ]


def test_the_table_of_rollouts_compares_each_dtype_with_its_own_generate(tiny):
    (report,) = rollout.measure("builtin:tiny", *tiny, MINI, repeats=1)
    assert [(row["variant"], row["dtype"]) for row in report.rows] == [
        (variant, dtype) for dtype in ("fp32", "bf16") for variant in ("generate", "ours", "ours, fast=false")
    ]
    rates = {(row["variant"], row["dtype"]): row["rate"] for row in report.rows}
    for row in report.rows:
        assert row["ratio"] == row["rate"] / rates["generate", row["dtype"]]
        assert row["ratio_fp32"] == row["rate"] / rates["generate", "fp32"]


def test_agents_talk_in_turns_and_their_prompts_are_counted_once_a_round(tiny):
    (report,) = rollout.measure_turns("builtin:tiny", *tiny, "fp32", num_agents=2, num_turns=3, max_tokens=2, repeats=2)
    sampler = Sampler(*tiny, max_tokens=2)
    outputs = sampler.talk(2, 3, 1)
    sampler.close()
    lengths = [output.prompt_length for output in outputs]
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[3] < lengths[4] < lengths[5]
    without, kept = report.rows
    assert without["prompt_tokens"] == kept["prompt_tokens"] == pytest.approx(sum(lengths), rel=0.1)  # other answers have other lengths
    assert kept["prefill_tokens"] < without["prefill_tokens"] <= without["prompt_tokens"]


# ----------------------------------------------------------------------------------------------------------------------- train


def test_all_variants_of_the_update_have_the_same_gradient(tiny):
    model, tokenizer = tiny
    rows = train.sampled_rows(model, tokenizer, MINI)
    gradients = {}
    for variant in train.VARIANTS:
        train.UpdatePass(variant, "fp32", model, tokenizer, rows)()
        gradients[variant] = train.gradients(model)
    plain = gradients.pop(train.FULL)
    assert plain.norm() > 0
    for gradient in gradients.values():
        assert (gradient - plain).norm() < 1e-5 * plain.norm()


def test_tokens_through_the_model_and_its_head_are_counted(tiny):
    model, tokenizer = tiny
    rows = train.sampled_rows(model, tokenizer, MINI)
    passes = {variant: train.UpdatePass(variant, "fp32", model, tokenizer, rows) for variant in train.VARIANTS}
    longest, num_response = max(row.num_tokens for row in rows), sum(len(row.response_ids) for row in rows)
    full, padded, tree = passes.values()
    assert (full.num_tokens, full.num_head_tokens) == (len(rows) * longest, len(rows) * longest)
    assert padded.num_tokens >= sum(row.num_tokens for row in rows)
    assert tree.num_tokens < padded.num_tokens  # each prompt once instead of twice
    assert padded.num_head_tokens == tree.num_head_tokens == num_response


def test_bf16_rounds_the_pass(tiny):
    model, tokenizer = tiny
    rows = train.sampled_rows(model, tokenizer, MINI)
    gradients = []
    for dtype in ("fp32", "bf16"):
        train.UpdatePass(train.FULL, dtype, model, tokenizer, rows)()
        gradients.append(train.gradients(model))
    gap = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-4 < gap < 0.2


def test_memory_is_measured_in_a_process_of_its_own():
    assert 0 < train.peak_gb("builtin:tiny", MINI, train.FULL, "fp32") < 1


def test_parameters_of_a_tied_head_are_counted_once(tiny):
    model, _ = tiny
    size = Size.of(model)
    assert size.head == model.config.vocab_size * model.config.hidden_size
    assert size.body + size.head == sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------------------------ step


def test_a_run_of_the_real_trainer_is_read_step_by_step():
    run = step.train(step.command_line("builtin:tiny", MINI, 2, 0, step.FP32), 1)
    assert [len(column) for column in (run.seconds, run.generate_s, run.update_s, run.rewards, run.tokens)] == [2] * 5
    for whole, generate, update in zip(run.seconds, run.generate_s, run.update_s, strict=True):
        assert 0 < generate + update <= whole
    assert all(4 <= tokens <= 12 for tokens in run.tokens)  # 2 x 2 answers of 1 to 3 tokens


PEER = """
import argparse, json, sys
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("output", type=Path)
options, rest = parser.parse_known_args()
assert (options.folder / "config.json").is_file() and (options.folder / "tokenizer.json").is_file()
tasks = json.loads((options.folder / "tasks.json").read_text())
assert set(tasks[0]) == {"question", "answer"} and len(tasks) == 4, tasks
if "--fail" in rest:
    sys.exit("no such thing")
given = dict(zip(rest[1::2], rest[2::2]))
numbers = [float(given["--prompts"]), float(given["--max-tokens"])]
output = {"seconds": numbers, "generate_s": [1.0, 1.0], "update_s": None, "rewards": [0.0, 1.0], "tokens": [8.0, 8.0], "peak_gb": 1.0}
options.output.write_text(json.dumps(output))
"""


def test_a_peer_gets_model_tasks_and_counts_and_its_failure_is_told(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    run = step.peer_run(Path(sys.executable), script, "builtin:tiny", MINI, 2, 0, ["--bf16"])
    assert (run.seconds, run.rewards, run.update_s) == ([2.0, 3.0], [0.0, 1.0], None)
    with pytest.raises(ValueError, match="no such thing"):
        step.peer_run(Path(sys.executable), script, "builtin:tiny", MINI, 2, 0, ["--fail"])


def test_a_table_of_steps_leaves_out_the_first_ones(monkeypatch):
    """Ours: steps 2+ of 4 and 2 s, median 3; 3 - 1 - 1 of them elsewhere. The peer's: 12 s, 4 times as long."""
    ours = StepRun([99.0, 4.0, 2.0], [9.0, 1.0, 1.0], [9.0, 2.0, 0.5], [0.0, 0.25, 0.75], [1.0, 5.0, 7.0], 2.0)
    peers = StepRun([99.0, 12.0, 12.0], [9.0, 4.0, 4.0], None, [0.5, 0.5, 0.5], [1.0, 5.0, 7.0], 3.0)
    monkeypatch.setattr(step, "our_run", lambda *_: ours)
    monkeypatch.setattr(step, "peer_run", lambda *_: peers)
    (report,) = step.measure("builtin:tiny", MINI, 3, peer=Path("python"), peer_script=Path("script"))
    rows = {(row["variant"], row["dtype"]): row for row in report.rows}
    row = rows["ours", "bf16"]
    assert (row["median_s"], row["min_s"], row["max_s"], row["generate_s"], row["rest_s"], row["tokens"]) == (3, 2, 4, 1, 2, 6)
    assert (row["ratio_bf16"], row["ratio_fp32"]) == (4, 4)
    assert row["overhead"] == pytest.approx((1 / 4 + 0.5 / 2) / 2)  # 4 - 1 - 2 of 4, and 2 - 1 - 0.5 of 2
    assert (row["reward_first"], row["reward_last"]) == (0.0, 0.75)
    assert (rows["peer", "bf16"]["ratio_bf16"], "overhead" in rows["peer", "bf16"]) == (1, False)

    (report,) = step.measure("builtin:tiny", MINI, 3, peer=Path("python"), peer_script=Path("script"), dtypes=["bf16"])
    assert [(row["variant"], row["dtype"]) for row in report.rows] == [key for key in rows if key[1] == "bf16"]
    assert all("ratio_fp32" not in row for row in report.rows)


# --------------------------------------------------------------------------------------------------------------------- harness


def test_the_stages_of_a_batch_are_those_of_a_training_step(tmp_path):
    """2 tasks of 3 answers: six episodes are written; each stage is measured once, and the shares are of the whole."""
    names = [name for name, seconds in harness.stages(2, 3, 7, tmp_path) if seconds >= 0]
    assert names == ["rollouts", "grouping", "filtering", "rows", "advantages", "metrics", "logging"]
    assert len(read_episodes(tmp_path / "train_step_7.jsonl")) == 6
    (report,) = harness.measure(num_episodes=6, group_size=3, repeats=1)
    assert [row["variant"] for row in report.rows] == [*names, "all"]
    assert report.counts["episodes"] == 6
    assert sum(row["share"] for row in report.rows) == pytest.approx(2)  # the stages, and all of them


# --------------------------------------------------------------------------------------------------------- machine and command


def test_the_rate_of_matrix_products_is_measured():
    limits = machine.Limits.measure(8, 16, {"fp32": torch.float32}, limit_s=0.0)
    assert limits.rates["fp32"] > 0
    assert limits.in_words().startswith("[8, 16] x [16, 64]: fp32 ")


def test_peak_memory_follows_what_is_allocated():
    machine.reset_peak_memory()
    before = machine.peak_memory()
    with mmap.mmap(-1, 50_000_000) as fresh:  # an allocator might take memory that is held already
        fresh.write(bytes(50_000_000))
    assert machine.peak_memory() - before > 30_000_000


def test_the_machine_is_described():
    described = machine.describe()
    assert {"cpu", "cores", "threads", "memory_gb", "torch", "load_average"} <= described.keys()
    assert json.loads(json.dumps(described)) == described


def test_a_report_is_printed_with_its_counts_and_notes():
    from rich.console import Console

    report = Report("Title", {"model": "m"}, [Column("a", "name"), Column("b", "share", ".0%")], [{"a": "x", "b": 0.5}, {"a": "y"}], ["so"])
    console = Console(width=60, record=True, file=io.StringIO())
    report.print(console)
    lines = [line.split() for line in console.export_text().splitlines() if line]
    assert lines == [["Title"], ["model", "m"], ["name", "share"], ["x", "50%"], ["y"], ["so"]]


def test_the_command_prints_json(benchmark, capsys):
    assert benchmark.main(["advantage", "--trajectories", "16", "--repeats", "1", "--threads", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["machine"]["threads"] == 1
    assert printed["reports"][0]["counts"]["trajectories"] == 16
    assert benchmark.main(["harness", "--episodes", "8", "--repeats", "1", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["counts"]["episodes"] == 8


def test_the_command_prints_tables_of_a_model(benchmark, capsys):
    sizes = ["--prompts", "2", "--samples", "2", "--max-tokens", "2", "--agents", "2", "--repeats", "1", "--threads", "1"]
    assert benchmark.main(["rollout", "--model", "builtin:tiny", *sizes]) == 0
    text = capsys.readouterr().out
    assert "Rollouts of builtin:tiny" in text
    assert "Conversations with builtin:tiny" in text


@pytest.mark.parametrize(
    ("argv", "words"), [(["train", "--model", "builtin:huge"], "builtin:tiny"), (["advantage", "--repeats", "0"], "at least 1")]
)
def test_the_command_refuses_what_it_cannot_do(benchmark, capsys, argv, words):
    assert benchmark.main([*argv, "--threads", "1"]) == 2
    assert words in capsys.readouterr().err
