"""What an agent does with a task."""

from rllm_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "workflow": "Workflow",
        "engine": "UnifiedWorkflowEngine",
        "environment": "Environment",
        "single_turn": "SingleTurnWorkflow",
        "multi_turn": "MultiTurnWorkflow",
        "solver_judge": "SolverJudgeWorkflow",
        "distill": "DistillWorkflow",
    },
)
