"""LoRA adapters: trained alone, saved alone, off for the reference policy, in what is sampled from and in what is exported.

Also recomputed activations, with adapters and without.
"""

import asyncio
import csv

import pytest
import torch

from experiments import run as run_script
from rllm_lightning.config import Config, load_config
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.types import Step
from tests.trainer.conftest import SMALL

LORA = ["model.lora_rank=2", "training.learning_rate=1e-2"]


def policy_of(*overrides):
    return Policy.from_config(Config.from_config(load_config([*SMALL, *overrides])))


def stirred(policy):
    """With an adapter that changes something: at first the half of each that comes last is 0."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(policy.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return policy


def micro_of(policy, prompt=(1, 10, 11, 4, 2), response=(20, 21, 22, 4)):
    (micro,) = policy.micro_batches([Row(Step(prompt_ids=list(prompt), response_ids=list(response)), 0, 0, "", None)], 1000)
    return micro


def logprobs(policy, micro=None):
    with torch.no_grad():
        return policy(micro or micro_of(policy)).logprobs


# -------------------------------------------------------------------------------------------------------------- checkpoints


def test_a_run_with_an_adapter_that_is_resumed_ends_where_an_uninterrupted_one_does_bit_for_bit(fit):
    args = ("rllm.trainer.total_batches=3", "rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=0", *LORA)
    args += ("rllm.algorithm.kl_beta=0.1", "training.num_epochs_per_batch=2", "warm_start.steps=2", "warm_start.batch_size=4")
    whole = fit(*args)
    assert any(p.abs().max() > 0 for name, p in whole.trainer.module.policy.named_parameters() if "lora_B" in name)
    for step in (1, 2):
        resumed = fit(*args, f"rllm.trainer.resume={whole.directory.checkpoints / f'step_{step}.ckpt'}")
        assert resumed.deterministic_rows() == whole.deterministic_rows()
        for a, b in zip(whole.trainer.module.policy.parameters(), resumed.trainer.module.policy.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_checkpoint_holds_the_adapter_alone(fit):
    """The value head is trained too; no copy of a reference policy is kept."""
    values = ("rllm.algorithm.adv_estimator=gae", "rllm.algorithm.value_coeff=0.5", "rllm.algorithm.kl_beta=0.1")
    run = fit("rllm.trainer.total_batches=1", *LORA, *values)
    path = run.directory.checkpoints / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    policy = run.trainer.module.policy
    trained = {f"policy.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == set(trained)
    assert {name.rpartition(".")[2] for name in trained if "lora_" not in name} == {"weight", "bias"}
    assert saved["rllm_lightning"]["reference"] is None
    assert path.stat().st_size < sum(p.numel() for p in policy.parameters())  # a twelfth of whole weights and two moments of 4 bytes each


def test_weights_of_another_adapter_are_not_taken_in_silence():
    weights = policy_of("model.lora_rank=2").state_dict()
    lacking = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        policy_of("model.lora_rank=2").load_state_dict(lacking)
    with pytest.raises(RuntimeError, match="size mismatch"):
        policy_of("model.lora_rank=3").load_state_dict(weights)


def test_without_an_adapter_a_state_dict_is_whole():
    policy = policy_of()
    assert set(policy.state_dict()) == {name for name, _ in policy.named_parameters(remove_duplicate=False)}


# ------------------------------------------------------------------------------------------------------------- reference


def test_the_reference_policy_is_the_model_without_its_adapter():
    policy, plain = stirred(policy_of("model.lora_rank=2")), policy_of()
    policy.keep_reference()
    micro = micro_of(policy)
    assert policy.reference_weights is None
    torch.testing.assert_close(policy.reference_logprobs(micro), logprobs(plain, micro))
    assert (policy.reference_logprobs(micro) - logprobs(policy, micro)).abs().max() > 0.01


# ---------------------------------------------------------------------------------------------------------------- exports


def test_the_exported_model_gives_the_logits_of_the_adapted_one_and_the_adapter_stands_beside_it(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, plain = stirred(policy_of("model.lora_rank=2")), policy_of()
    before = logprobs(policy)
    policy.save(tmp_path / "model")
    assert torch.equal(logprobs(policy), before)  # it goes on with its adapter

    ids = torch.arange(10, 30)[None]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == policy.tokenizer.chat_template
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(plain.model, tmp_path / "model" / "adapter")
    with torch.no_grad():
        expected, base = policy.model(ids).logits, policy_of().model(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-6, rtol=1e-6)
    assert (expected - base).abs().max() > 0.1


# --------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-5), ("bfloat16", 0.05)])
def test_rollouts_are_sampled_from_the_adapted_weights_of_the_moment(dtype, tolerance):
    """Their log-probs are the trainer's, also of a copy in another precision, and after an update."""
    policy = stirred(policy_of("model.lora_rank=2"))
    sampling = SamplingParams(max_tokens=12)
    engine = HFEngine(EngineSetup(policy.model, policy.tokenizer, train=sampling), dtype=dtype)

    def ask():
        answer = asyncio.run(engine.get_model_response([{"role": "user", "content": "say a"}]))
        micro = micro_of(policy, answer.prompt_ids, answer.completion_ids)
        torch.testing.assert_close(torch.tensor([answer.logprobs]), logprobs(policy, micro), atol=tolerance, rtol=0)
        assert (policy.reference_logprobs(micro) - logprobs(policy, micro)).abs().max() > 4 * tolerance
        return answer

    first = ask()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    engine.on_weights_updated(1)
    assert ask().completion_ids != first.completion_ids


# ------------------------------------------------------------------------------------------------ recomputed activations


@pytest.mark.parametrize("adapter", [[], ["model.lora_rank=2"]], ids=["whole", "adapter"])
def test_recomputed_activations_give_the_same_gradients(adapter):
    def gradients(*overrides):
        policy = stirred(policy_of(*adapter, *overrides))
        passes = []
        policy._causal_lm.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
        with policy.training_mode():
            policy(micro_of(policy)).logprobs.sum().backward()
        return len(passes), {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}

    (once, kept), (twice, recomputed) = gradients(), gradients("model.gradient_checkpointing=true")
    assert (once, twice) == (1, 2)
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[name], recomputed[name]) and kept[name].abs().max() > 0 for name in kept)


# ----------------------------------------------------------------------------------------------------------------- preset


def test_the_preset_lora_runs(tmp_path, capfd):
    """Two steps with the small model in place of SmolLM2; the second one's adapter is what the first made of it."""
    small = ["model.name=builtin:tiny", "data.train_batch_size=1", "data.max_response_length=4", "task.train_size=4", "task.val_size=1"]
    quick = [
        "rllm.trainer.total_batches=2",
        "rllm.trainer.test_freq=-1",
        "rllm.trainer.val_before_train=false",
        "rllm.trainer.logger=[csv]",
    ]
    code = run_script.main(["lora", *small, *quick, "rllm.algorithm.entropy_coeff=0.1", f"run_root={tmp_path}"])  # no answer is right
    assert code == 0, capfd.readouterr().err
    (folder,) = (tmp_path / "rllm-lightning").glob("*")
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[0]["actor/kl_ref"]) == 0 < float(rows[1]["actor/kl_ref"])
    assert (folder / "checkpoints" / "model" / "adapter" / "adapter_config.json").is_file()
