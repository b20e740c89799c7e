"""The default job made so small that a step takes a moment: overrides of the command line, for tests of real commands."""

QUICK = [
    "task.dataset=spell_backward",
    "task.params={min_word_len: 3, max_word_len: 4}",
    "task.train_size=8",
    "task.val_size=2",
    "warm_start.steps=0",
    "rllm.rollout.n=2",
    "training.num_minibatches=1",
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "rllm.trainer.test_freq=-1",
    "rllm.trainer.val_before_train=false",
    "rllm.trainer.logger=[csv]",
]
