"""The loop."""

from rllm_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "protocol": "BackendProtocol TrainerState",
        "backend": "LightningBackend",
        "module": "UnifiedLightningModule",
        "unified_trainer": "AgentTrainer UnifiedTrainer",
    },
)
