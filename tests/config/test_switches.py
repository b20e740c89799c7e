"""Every switch does something."""

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rllm_lightning import schema
from rllm_lightning.config import AlgorithmConfig, Config, load_config


def leaves(cls=Config, path=""):
    """The dotted key of every leaf; of open sections only what holds for every entry."""
    for key, leaf in schema.keys_of(cls).items():
        if schema.is_section(leaf.kind):
            yield from leaves(leaf.kind, f"{path}{key}.")
        else:
            yield f"{path}{key}"


LEAVES = sorted(
    [*leaves(), "task.size", "task.level", "task.sizes", "task.tag", "task.more", "rollout_engine.batch", "rollout_engine.kind"]
)
# Values that are neither true, 3 nor "other", and what has to be said with them.
FLIPS = {
    "rllm.algorithm.adv_estimator": "rloo",
    "rllm.algorithm.estimator_map": "{solver: rloo}",
    "rllm.algorithm.loss_fn_map": "{solver: cispo}",
    "rllm.algorithm.estimator_kwargs": "{epsilon: 1e-3}",
    "rllm.algorithm.loss_kwargs": "{clip_low: 0.1}",
    "rllm.algorithm.loss_fn": "cispo",
    "rllm.algorithm.loss_agg_mode": "token-sum",
    "rllm.algorithm.kl_estimator": "k1",
    "rllm.algorithm.kl_in": "reward",
    "rllm.algorithm.rollout_correction.mode": "tis",
    "rllm.algorithm.rollout_correction.level": "sequence",
    "rllm.algorithm.lr_schedule": "cosine",
    "rllm.algorithm.warmup_steps_ratio": "0.5",
    "rllm.stepwise_advantage.norm_adv_by_std_in_grpo": "false",
    "rllm.rejection_sample.mode": "group",
    "rllm.workflow.name": "multi_turn",
    "rllm.workflow.workflow_args": "{x: 1}",
    "rllm.workflow.gamma": "0.5",
    "rllm.trainer.logger": "[csv]",
    "task.name": "jsonl",
    "task.sizes": "0 1",
    "task.more": "{x: 1}",
    "model.attn_implementation": "eager",
    "model.chat_template_kwargs": "{enable_thinking: false}",
    "model.dtype": "bfloat16",
    "training.optimizer": "sgd",
    "training.beta1": "0.5",
    "warm_start.wrong_solutions": "0.5",
    "training.beta2": "0.5",
    "sampling.train.top_p": "0.5",
    "sampling.val.top_p": "0.5",
    "rollout_engine.name": "remote",
    "rollout_engine.kind": "slow",
    "wandb.mode": "offline",
    "wandb.resume": "allow",
}
TOGETHER = {
    "rllm.rejection_sample.mode": ["rllm.rejection_sample.enable=true"],
    "rllm.rejection_sample.multiplier": ["rllm.rejection_sample.enable=true"],
    "task.name": ["task.file=x"],
}
# Deprecated: warns, and means broadcast. Imports a module: tested with plugins.
UNCHANGING = {"rllm.stepwise_advantage.mode", "plugins"}


def flipped(key, default):
    if key in FLIPS:
        return FLIPS[key]
    if isinstance(default, bool):
        return str(not default)
    number = isinstance(default, int | float) or key.endswith(("size", "seed", "length"))
    return "3" if number else "other"


@pytest.mark.parametrize("key", sorted(set(LEAVES) - UNCHANGING))
def test_every_switch_changes_the_resolved_config(key):
    """B48: flip every leaf in turn; each flip changes the resolved config object, and nothing but its leaf."""
    together = TOGETHER.get(key, [])
    before = load_config([] if key == "task.name" else together)
    after = load_config([f"{key}={flipped(key, OmegaConf.select(before, key))}", *together])
    assert Config.from_config(after) != Config.from_config(before)
    if key == "rllm.stepwise_advantage.norm_adv_by_std_in_grpo":  # an old home: the value moves to the new one
        key = "rllm.algorithm.norm_adv_by_std_in_grpo"
    if not key.endswith(".name"):
        OmegaConf.set_struct(after, False)
        OmegaConf.update(after, key, OmegaConf.select(before, key), merge=False)
        assert after == before


def test_norm_by_std_is_read_from_the_algorithm(typed):
    """B48: rllm.algorithm.norm_adv_by_std_in_grpo=false was read from another section with a default."""
    assert typed("rllm.algorithm.norm_adv_by_std_in_grpo=false").rllm.algorithm.norm_adv_by_std_in_grpo is False
    config = {"rllm": {"algorithm": {"norm_adv_by_std_in_grpo": False}}}
    assert AlgorithmConfig.from_config(config).norm_adv_by_std_in_grpo is False


def test_the_sampling_of_validation_stands_on_its_own(typed):
    """B48: validation settings are those under sampling.val, nothing is inherited."""
    config = typed("sampling.train.temperature=0.5", "sampling.train.top_k=3")
    assert (config.sampling.val.temperature, config.sampling.val.top_k) == (1.0, 0)


def test_the_data_seed_is_the_seed_unless_it_is_given(typed):
    assert (typed("seed=3").data_seed, typed("seed=3", "data.seed=0").data_seed) == (3, 0)


def test_the_resolved_config_holds_every_key_and_refuses_others():
    config = load_config([])
    assert [key for key in LEAVES if OmegaConf.select(config, key, default=...) is ...] == []
    with pytest.raises(OmegaConfBaseException):
        _ = config.rllm.rolout
