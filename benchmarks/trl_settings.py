"""What the benchmarks beside TRL share: the settings of a GRPOTrainer in BF16 with vLLM colocated."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any


def title(liger: bool) -> str:
    return f"TRL {importlib.metadata.version('trl')}{' with Liger' if liger else ''}"


def grpo_settings(folder: Path, *, steps: int, prompts: int, samples: int, tokens: int, prompt_tokens: int,
                  microbatch: int, liger: bool, **more: Any) -> dict[str, Any]:
    """Arguments of GRPOConfig: a step samples prompts x samples completions of at most `tokens` tokens, and
    makes one update of them without a KL term. more: arguments that are added, or win. Exits if the
    micro-batches do not fill a step."""
    whole, rest = divmod(prompts * samples, microbatch)
    if rest:
        sys.exit(f"--microbatch {microbatch} does not divide the {prompts * samples} completions of a step")
    return dict(
        output_dir=str(folder), max_steps=steps, bf16=True, per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=whole, num_generations=samples, max_completion_length=tokens, beta=0.0,
        temperature=1.0, gradient_checkpointing=True, use_liger_kernel=liger, use_vllm=True,
        vllm_mode="colocate", vllm_max_model_length=tokens + prompt_tokens, save_strategy="no",
        report_to="none", logging_steps=1,
    ) | more
