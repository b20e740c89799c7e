"""From runs to an honest answer: which group is better, by how much, and whether that can be said at all.

from rllm_lightning.lab.compare import compare_runs
compare_runs(["runs/my-sweep"], ["rllm.algorithm.adv_estimator"]).conclusions

runs -> measures -> groups -> comparison (statistics, caveats, conclusions) -> tables, figures -> terminal, page, data, wandb_run
"""

from rllm_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "comparison": "compare_runs",
        "results": "Comparison GroupResult PairResult Summary",
        "runs": "Run find_runs read_run",
        "measures": "Curve Metric Reach curve_of reach",
        "groups": "Group make_groups",
        "statistics": "Difference Interval holm interquartile_mean interquartile_mean_interval mean_interval paired_test seeds_needed "
        "welch_test",
        "terminal": "print_comparison",
        "page": "comparison_page",
        "data": "comparison_data",
        "figures": "figures_of",
        "wandb_run": "log_comparison",
        "coverage": "measure_coverage",
    },
    extra="lab",
)
