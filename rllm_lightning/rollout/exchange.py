"""`WeightFolder`: the policy's present weights as a Hugging Face checkpoint, for a sampler in another process.

Every version gets a folder of its own, so that nobody reads a file that is being written or remembers an old one by its name;
the folder before it is deleted.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

IN_MEMORY = Path("/dev/shm")  # a file system in memory, where there is one


class WeightFolder:
    """Folders below `parent` (None: a temporary one, in memory where possible); the sampler must see the same path.

    Raises:
        ValueError: several training processes, of which each would change the weights that the others sample from.
    """

    def __init__(self, model: Any, tokenizer: Any, parent: str | None = None):
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("rollout_engine.name: this engine trains with one process only; set lightning.devices=1, or take hf")
        self._model, self._tokenizer = model, tokenizer
        base = Path(parent) if parent else IN_MEMORY if IN_MEMORY.is_dir() else None
        if parent:
            Path(parent).mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix="rllm-lightning-weights-", dir=base)).resolve()
        self._count = 0

    async def write(self) -> Path:
        """Save the present weights; the folder. The event loop goes on meanwhile, the weights must not change."""
        from rllm_lightning.models.save import save_model

        self._count += 1
        folder = self._root / str(self._count)
        await asyncio.to_thread(save_model, self._model, self._tokenizer, folder)
        shutil.rmtree(self._root / str(self._count - 1), ignore_errors=True)
        return folder

    def remove(self) -> None:
        """Delete all of it. Idempotent."""
        shutil.rmtree(self._root, ignore_errors=True)
