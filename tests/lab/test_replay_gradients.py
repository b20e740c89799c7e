"""Gradients on stored rollouts: exact on a policy that is a table, and those that the trainer took on a model."""

import csv
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rllm_lightning.algorithms.advantage import calculate_rloo_advantages
from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.lab.oracle import from_rewards, gradient_moments
from rllm_lightning.lab.policy import binary_prompt
from rllm_lightning.lab.replay import caveats, measure_gradients, print_replay, replay_data, replay_page, replay_run
from rllm_lightning.lab.replay.batches import Batch
from rllm_lightning.lab.replay.subjects import parse_subjects
from rllm_lightning.lab.replay.weigh import Weigher, advantages_of
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.layout import micro_batches
from rllm_lightning.trainer.policy import Policy, Scores
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

# ------------------------------------------------------------------------------------------------------------- a table


class TablePolicy(torch.nn.Module):
    """`lab.policy.TabularPolicy` as the trainer sees a policy; its only parameters are the logits."""

    training_mode = Policy.training_mode

    def __init__(self, table):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.from_numpy(table.logits_SV.copy()))
        self.rows = {prefix: row for row, prefix in enumerate(table.prefixes)}
        self.model = SimpleNamespace(dtype=torch.float64)

    def micro_batches(self, rows, max_tokens):
        return micro_batches(rows, max_tokens)

    def forward(self, micro):
        places = [self.rows[tuple(row.response_ids[:t])] for row in micro.rows for t in range(len(row.response_ids))]
        logprobs_NV = self.logits[places].log_softmax(dim=-1)
        chosen_N = logprobs_NV.gather(1, micro.targets_N[:, None])[:, 0]
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return Scores(micro.spread(chosen_N), micro.spread(entropies_N))


def table_batch(prompt, choices, weight_version=0):
    """One group for each tuple of sequences."""
    groups = []
    for number, chosen in enumerate(choices):
        trajectories = [
            Trajectory(
                reward=float(prompt.rewards_Y[y]),
                steps=[
                    Step(
                        prompt_ids=[9],
                        response_ids=list(prompt.policy.sequences[y]),
                        logprobs=prompt.policy.token_logprobs(prompt.policy.sequences[y]).tolist(),
                        weight_version=weight_version,
                    )
                ],
            )
            for y in chosen
        ]
        groups.append(TrajectoryGroup(trajectories, f"t{number}:solver"))
    return Batch(1, groups, len(groups), 0)


def config_of(*overrides):
    keys = [
        "rllm.algorithm.loss_fn=importance_sampling",
        "rllm.algorithm.loss_agg_mode=seq-mean-token-sum",
        "training.micro_batch_tokens=4",
    ]
    return Config.from_config(load_config([*keys, *overrides]))


def measure(prompt, batches, names, config=None, **kwargs):
    config = config or config_of()
    subjects = parse_subjects(names, config.rllm.algorithm)
    prepared = []
    weighers = [Weigher(subject) for subject in subjects]
    for batch in batches:
        kept = {}
        for weigher in weighers:
            weigher(batch)
            kept[weigher.subject.label] = advantages_of(batch)
        prepared.append((batch, kept))
    checkpoint = SimpleNamespace(policy=TablePolicy(prompt.policy), step=0, weight_version=0)
    return measure_gradients(prepared, subjects, checkpoint, config, **kwargs)


def test_norms_and_cosines_are_those_of_the_scores_weighted_by_hand():
    prompt = binary_prompt(0.25)
    choices = [(0, 1, 2), (1, 3, 3), (0, 0, 1)]
    rewards, scores = prompt.rewards_Y, prompt.policy.scores_YD
    expected = {}
    for name in ("reinforce", "rloo"):
        r = [rewards[list(chosen)] for chosen in choices]
        advantages = r if name == "reinforce" else calculate_rloo_advantages(r)[0]
        expected[name] = sum(a @ scores[list(chosen)] for a, chosen in zip(advantages, choices, strict=True)) / 9
    report = measure(prompt, [table_batch(prompt, choices)], ["reinforce", "rloo"])
    norms = [np.linalg.norm(g) for g in expected.values()]
    assert report.values.norm == pytest.approx(norms, rel=1e-6)  # sums are kept in float32
    assert report.values.cosine[0, 1] == pytest.approx(expected["reinforce"] @ expected["rloo"] / np.prod(norms), rel=1e-6)
    assert (report.num_prompts, report.num_rows, report.relative_error, report.on_policy) == (3, 9, 0, True)


@pytest.mark.parametrize("name", ["rloo", "reinforce"])
def test_signal_and_variance_are_on_average_those_of_the_oracle(name):
    """Every batch of two groups of two, with its probability: mean signal |E g|², mean variance the trace of Cov g."""
    prompt = binary_prompt(0.25)
    probs = prompt.policy.probs_Y
    groups = list(itertools.product(range(len(probs)), repeat=2))
    function = calculate_rloo_advantages if name == "rloo" else (lambda rewards: (rewards, rewards))
    moments = gradient_moments(from_rewards(function), [prompt], 2)
    signal = variance = 0.0
    for batch in itertools.combinations_with_replacement(groups, 2):
        weight = probs[list(batch[0])].prod() * probs[list(batch[1])].prod() * (1 if batch[0] == batch[1] else 2)
        found = measure(prompt, [table_batch(prompt, batch)], [name]).values
        signal += weight * found.signal[0]
        variance += weight * found.variance[0]
    assert signal == pytest.approx(moments.mean_D @ moments.mean_D, rel=1e-5)
    assert variance == pytest.approx(np.trace(moments.covariance_DD), rel=1e-5)


def test_batches_taken_together_are_the_mean_of_their_prompts():
    prompt = binary_prompt(0.5)
    first, second = table_batch(prompt, [(0, 1), (1, 2)]), table_batch(prompt, [(0, 3), (2, 3)])
    both = table_batch(prompt, [(0, 1), (1, 2), (0, 3), (2, 3)])
    together, at_once = measure(prompt, [first, second], ["rloo"]), measure(prompt, [both], ["rloo"])
    assert together.num_prompts == 4
    for name in ("norm", "variance", "signal"):
        assert getattr(together.values, name) == pytest.approx(getattr(at_once.values, name), rel=1e-6)


def test_roles_of_a_task_are_one_prompt():
    prompt = binary_prompt(0.5)
    batch = table_batch(prompt, [(0, 1), (1, 2), (0, 3)])
    for group, group_id in zip(batch.groups, ["a:solver", "a:judge", "b:solver"], strict=True):
        group.group_id = group_id
    assert measure(prompt, [batch], ["rloo"]).num_prompts == 2


def test_a_dropped_group_has_no_gradient_and_counts_in_no_denominator():
    prompt = binary_prompt(0.5)
    with_single, without = table_batch(prompt, [(0, 1), (1,)]), table_batch(prompt, [(0, 1)])
    dropped = measure(prompt, [with_single], ["grpo:singleton=drop"]).values.norm
    assert dropped == pytest.approx(measure(prompt, [without], ["grpo"]).values.norm, rel=1e-6)


@pytest.mark.parametrize("loss", ["kl_cov", "gspo", "ppo"])
def test_prompts_add_up_to_the_batch_for_losses_of_every_scope(loss):
    """Micro-batches of one prompt, or all in one: the same gradient, also where tokens of the whole batch see each other."""
    prompt = binary_prompt(0.5)
    choices = [(0, 1, 3), (1, 2, 2), (0, 3, 1)]
    keys = (f"rllm.algorithm.loss_fn={loss}", "rllm.algorithm.entropy_coeff=0.1")
    config = config_of(*keys)
    (subject,) = parse_subjects(["rloo"], config.rllm.algorithm)
    batch = table_batch(prompt, choices)
    Weigher(subject)(batch)
    kept = {"rloo": advantages_of(batch)}
    checkpoint = SimpleNamespace(policy=TablePolicy(prompt.policy), step=0, weight_version=0)
    apart = measure_gradients([(batch, kept)], [subject], checkpoint, config)
    for number, group in enumerate(batch.groups):  # roles of one task are one prompt
        group.group_id = f"one:role{number}"
    together = measure_gradients([(batch, kept)], [subject], checkpoint, config)
    assert (apart.num_prompts, together.num_prompts) == (3, 1)
    assert together.values.norm == pytest.approx(apart.values.norm, rel=1e-6)


def test_rollouts_of_other_weights_are_weighted_by_their_ratio():
    prompt, other = binary_prompt(0.25), binary_prompt(0.5)
    choices = [(0, 1), (1, 2)]
    batch = table_batch(other, choices, weight_version=7)  # drawn from `other`, with its log-probs
    report = measure(prompt, [batch], ["reinforce"])
    token_scores, sequences = prompt.policy.token_scores, prompt.policy.sequences
    expected = 0
    for y in (y for chosen in choices for y in chosen):
        ratios = np.exp(prompt.policy.token_logprobs(sequences[y]) - other.policy.token_logprobs(sequences[y]))
        expected = expected + prompt.rewards_Y[y] * ratios @ token_scores[y] / 4
    assert not report.on_policy
    assert report.drift > 0.01
    assert report.values.norm[0] == pytest.approx(np.linalg.norm(expected), rel=1e-6)


def test_a_batch_without_tokens_is_refused():
    batch = table_batch(binary_prompt(0.5), [(0, 1)])
    for trajectory in batch.trajectories:
        trajectory.steps[0].response_ids, trajectory.steps[0].logprobs = [], []
    with pytest.raises(ValueError, match="no gradient can be taken"):
        measure(binary_prompt(0.5), [batch], ["rloo"])


def test_sums_that_are_too_large_are_replaced_by_sketches(monkeypatch):
    monkeypatch.setattr("rllm_lightning.lab.replay.gradients.MAX_SUMS", 0)
    prompt = binary_prompt(0.25)
    batch = [table_batch(prompt, [(0, 1, 2), (1, 3, 3), (0, 0, 1)])]
    exact = measure(prompt, batch, ["reinforce", "rloo"])
    assert exact.exact_sums  # so few parameters are sketched without any error
    rough = [measure(prompt, batch, ["reinforce", "rloo"], dimensions=4, seed=seed) for seed in range(200)]
    assert not rough[0].exact_sums
    squares = np.array([report.values.norm[0] ** 2 for report in rough]) / exact.values.norm[0] ** 2
    assert squares.mean() == pytest.approx(1, abs=0.15)
    assert squares.std() <= rough[0].relative_error * 1.15


# ------------------------------------------------------------------------------------------------------------- a model

RUN = [
    "model.name=builtin:tiny",
    "rllm.trainer.logger=[csv]",
    "rllm.rollout.n=4",
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=4",
    "training.learning_rate=1e-3",
    "rllm.trainer.test_freq=-1",
    "rllm.trainer.val_before_train=false",
    "rllm.trainer.total_batches=2",
    "rllm.trainer.save_freq=1",
]


def vowel_reward(task, response):
    return sum(c in "aeiou" for c in response) / max(1, len(response)) + 0.01 * len(response)


@pytest.fixture(scope="module", params=["ppo", "kl_cov"])
def run(request, tmp_path_factory):
    """Two batches by a model; with kl_cov also a reference policy and an entropy bonus."""
    extra = ["rllm.algorithm.kl_beta=0.05", "rllm.algorithm.entropy_coeff=0.01"] if request.param == "kl_cov" else []
    config = load_config([*RUN, f"rllm.algorithm.loss_fn={request.param}", *extra, f"run_root={tmp_path_factory.mktemp('runs')}"])
    tasks = [{"id": f"t{i}", "question": f"say {chr(97 + i)}", "answer": "a", "data_source": "letters"} for i in range(4)]
    trainer = UnifiedTrainer(LightningBackend, config, SingleTurnWorkflow, tasks, [], {"reward_function": vowel_reward})
    trainer.fit()
    return trainer.run_directory


def test_the_gradient_is_the_one_that_was_trained(run):
    """The norm that the run logged before clipping at step 2, from its checkpoint of step 1 and its episodes of step 2."""
    with run.metrics_csv.open(newline="") as file:
        logged = {int(float(row["step"])): float(row["optim/grad_norm"]) for row in csv.DictReader(file)}
    replay = replay_run(run.path, ["grpo", "rloo", "dr_grpo"], checkpoint=run.checkpoints / "step_1.ckpt")
    report = replay.gradients
    assert (report.step, report.steps, report.on_policy, report.num_prompts) == (1, [2], True, 4)
    assert report.values.norm[0] == pytest.approx(logged[2], rel=1e-4)
    assert report.drift < 1e-8
    # rloo is dr_grpo times 4/3: without KL and entropy so are their gradients, whatever the sketch
    if replay.loss == "ppo":
        assert report.values.cosine[1, 2] == pytest.approx(1, abs=1e-6)
        assert report.values.norm[1] == pytest.approx(4 / 3 * report.values.norm[2], rel=1e-5)
        assert report.errors.cosine[1, 2] == pytest.approx(0, abs=1e-4)


def test_rollouts_that_were_trained_on_already_are_flagged(run, capsys):
    from rich.console import Console

    replay = replay_run(run.path, ["grpo", "rloo"], checkpoint=run.checkpoints / "last.ckpt")
    assert (replay.gradients.step, replay.gradients.steps, replay.gradients.on_policy) == (2, [2], False)
    said = caveats(replay)
    assert any("were not drawn from the weights of step 2 (KL" in sentence for sentence in said)
    assert any("those weights were trained on step 2 already" in sentence for sentence in said)
    print_replay(replay, Console(width=200))
    assert "signal to noise of the gradient at step 2 on step 2 (4 prompts)" in capsys.readouterr().out
    assert "Agreement of gradients" in replay_page(replay)
    assert replay_data(replay)["gradients"]["norm"]["value"] == pytest.approx(replay.gradients.values.norm.tolist())


def test_a_checkpoint_from_elsewhere_is_not_taken_for_the_sampler(run, tmp_path):
    copy = tmp_path / "step_1.ckpt"
    copy.write_bytes((run.checkpoints / "step_1.ckpt").read_bytes())
    assert not replay_run(run.path, ["grpo"], checkpoint=copy).gradients.on_policy


def test_checkpoints_that_are_none_of_ours_are_refused(run, tmp_path):
    """B56: nothing but plain data is read."""
    torch.save({"weights": torch.zeros(1)}, tmp_path / "foreign.ckpt")
    torch.save({"config": SimpleNamespace(a=1)}, tmp_path / "object.ckpt")
    content = torch.load(run.checkpoints / "last.ckpt", weights_only=True)
    content["state_dict"] = {key: value for key, value in content["state_dict"].items() if "layers.0" not in key}
    torch.save(content, tmp_path / "other.ckpt")
    for name, message in [("foreign", "not one of this library's"), ("object", "cannot be read as plain data"), ("other", "another model")]:
        with pytest.raises(ValueError, match=message) as refusal:
            replay_run(run.path, ["grpo"], checkpoint=tmp_path / f"{name}.ckpt")
        assert not isinstance(refusal.value, ConfigError)
        assert len(str(refusal.value).splitlines()) == 1
