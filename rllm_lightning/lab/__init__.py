"""What can be known of an estimator, of a run, and of many runs."""

from rllm_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "compare": "Comparison compare_runs comparison_data comparison_page print_comparison",
        "replay": "Replay print_replay replay_data replay_page replay_run",
    },
    extra="lab",
)
