"""TRL's GRPOTrainer as a peer of `experiments/benchmark.py step --peer PYTHON`, under an interpreter of its own:

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0 reasoning-gym datasets
    python experiments/benchmark.py step --peer PEER/bin/python

FOLDER holds a model and `tasks.json`; what came of the run goes to OUTPUT (see `rllm_lightning/lab/speed/step.py`). It imports nothing
of this library. TRL is used as it comes, with neutral sampling, one update a step, and a stopwatch around `generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    for name in ("prompts", "samples", "max-tokens", "steps", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16; the weights stay float32")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations, which TRL recomputes by default")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    import reasoning_gym
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    course: dict[str, list[float]] = {"seconds": [], "generate_s": [], "rewards": [], "tokens": []}
    clock = {"step": 0.0, "generate": 0.0}

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **columns: Any) -> list[float]:
        scores = []
        for completion, right in zip(completions, answer, strict=True):
            numbers = re.findall(r"-?\d+", completion[0]["content"])
            scores.append(float(score(numbers[-1] if numbers else "", {"answer": right})))
        course["rewards"].append(sum(scores) / len(scores))
        course["tokens"].append(float(sum(map(len, completion_ids))))
        return scores

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.update(step=time.perf_counter(), generate=0.0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            course["seconds"].append(time.perf_counter() - clock["step"])
            course["generate_s"].append(clock["generate"])

    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    generate = model.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        clock["generate"] += time.perf_counter() - start
        return output

    model.generate = timed_generate
    tasks = json.loads((options.folder / "tasks.json").read_text())
    rows = [{"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"]} for task in tasks]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=not torch.cuda.is_available(),
                bf16=options.bf16,
                gradient_checkpointing=not options.no_checkpointing,
                per_device_train_batch_size=options.prompts * options.samples,
                num_generations=options.samples,
                max_completion_length=options.max_tokens,
                max_steps=options.steps,
                shuffle_dataset=False,
                learning_rate=options.learning_rate,
                lr_scheduler_type="constant",
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                seed=options.seed,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(options.folder),
            callbacks=[Stopwatch()],
        )
        trainer.train()
    options.output.write_text(json.dumps({**course, "update_s": None, "peak_gb": peak_gb()}))


def peak_gb() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9


if __name__ == "__main__":
    main(arguments())
