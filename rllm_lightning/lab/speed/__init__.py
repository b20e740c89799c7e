"""How fast this library is, beside plain code, other libraries and the limits of the machine: `experiments/benchmark.py`.

    advantage.py  estimators over many trajectories         beside a NumPy loop over the groups
    rollout.py    sampling, single turns and several        beside Hugging Face `generate`, and without kept state
    train.py      one update pass: seconds and memory       beside padded rows with full logits
    step.py       whole GRPO steps through the real trainer beside another library, under its own interpreter
    harness.py    what is neither model nor update: microseconds an episode, by stage

Each has a `measure` that returns reports (`report.py`): tables with their counts. All variants of a table run in turns within
one run (`timing.py`), so that a machine that gets slower or faster does so for all of them. What the machine could do at best
is measured in the same run (`machine.py`). To add a comparison: a module here with a `measure`, and its name in the command.
"""
