"""What other estimators would have made of the rollouts that a run wrote down.

from rllm_lightning.lab.replay import replay_run
replay_run("runs/my-project/my-run", ["grpo", "rloo"]).pair("grpo", "rloo").mean("pearson")

episodes -> batches -> weigh (each of the subjects) -> agreement, extremes --.
                          '-> gradients (checkpoint, projection, noise) ------> results -> sentences, tables -> terminal, page, data
"""

from rllm_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "replaying": "replay_run",
        "results": "Estimate EstimatorResult GradientReport PairResult Replay Reproduction TrainedOn TrainingReport",
        "agreement": "Agreement agreement_of correlation effective_share ranks zero_share",
        "extremes": "Extreme",
        "noise": "SignalAndNoise signal_and_noise with_errors",
        "projection": "CountSketch",
        "gradients": "measure_gradients",
        "training": "train_on",
        "sentences": "caveats conclusions headline",
        "terminal": "print_replay",
        "page": "replay_page",
        "data": "replay_data",
    },
)
