"""A W&B sweep on this machine, without a server: `experiments/sweep.py`.

    definition.py  the YAML, read and checked as W&B would, and the command line of a trial
    engine.py      W&B's own search: the next trial's values, and who is to be stopped early
    trial.py       one trial: its values, its state, its folder, what its run has logged
    launch.py      a trial as a process, its share of the machine, its end
    leash.py       what stands between the runner and a trial's command, so that none outlives the other
    runner.py      the loop: start, watch, stop early, end, go on later
    view.py        the table on the terminal

    YAML  ->  definition  ->  engine: values  ->  launch: process  ->  trial: metrics.csv  ->  engine: next values, stops

A trial is what W&B's agent would have made of the same YAML: the same command line (with `--run_root` behind it, so that all runs lie
in the sweep's folder) and the same environment, but for the sweep's id, which no server knows. Everything that a restart needs is in
the folder: nothing else is remembered.
"""
