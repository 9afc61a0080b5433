"""Every option of TRL 1.16's GRPOConfig, and what becomes of it here: one table of data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Fate = Literal["honoured", "ignored", "refused"]


class Option(NamedTuple):
    """fate: "honoured", it does what it does in TRL; "ignored", it means nothing here, as `note` says; "refused", only
    the values of `allowed` (and the default) are taken, and `note` says what to use instead."""

    default: Any
    fate: Fate
    note: str = ""
    allowed: tuple[Any, ...] = ()


def yes(default: Any, note: str = "") -> Option:
    return Option(default, "honoured", note)


def some(default: Any, note: str, *allowed: Any) -> Option:
    """Honoured for these values; others are refused."""
    return Option(default, "honoured", note, (default, *allowed))


def moot(default: Any, note: str) -> Option:
    return Option(default, "ignored", note)


def no(default: Any, note: str, *allowed: Any) -> Option:
    """Refused but for its default and values that mean the same."""
    return Option(default, "refused", note, (default, *allowed))


def all_moot(options: Mapping[str, Any], note: str) -> dict[str, Option]:
    """Options that mean nothing here for one and the same reason."""
    return {name: moot(default, note) for name, default in options.items()}


VLLM = {
    "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None, "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
LOADER = {
    "dataloader_drop_last": False, "dataloader_num_workers": 0, "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None, "dataloader_in_order": True,
}  # fmt: skip
RANKS = {
    "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
    "ddp_static_graph": None, "ddp_backend": None, "ddp_timeout": 1800, "local_rank": -1,
    "average_tokens_across_devices": True, "ds3_gather_for_generation": True, "log_on_each_node": True,
    "log_level_replica": "warning", "save_on_each_node": False,
}  # fmt: skip
HUB = {
    "hub_token": None, "hub_private_repo": None, "hub_model_id": None, "hub_strategy": "every_save",
    "hub_always_push": False, "hub_revision": None,
}  # fmt: skip
EVAL_LOOP: dict[str, Any] = {
    "per_device_eval_batch_size": 8, "prediction_loss_only": False, "eval_do_concat_batches": True,
    "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [],
    "batch_eval_metrics": False, "bf16_full_eval": False, "fp16_full_eval": False,
}  # fmt: skip
MEMORY = {
    "activation_checkpointing": None, "activation_checkpointing_kwargs": None, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": None, "torch_empty_cache_steps": None, "use_liger_kernel": False,
    "liger_kernel_config": None,
}  # fmt: skip

SAPO = {"sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
ENTROPY = {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2}

OPTIONS: dict[str, Option] = {
    # Run
    "output_dir": yes(None, "null: trainer_output; a run's files go to its folder `runs`, a new one each time"),
    "seed": yes(42),
    "use_cpu": yes(False),
    "run_name": yes(None, "null: the name of output_dir"),
    "project": yes("huggingface", "changed: before WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME"),
    "trackio_space_id": no(None, "set the variable TRACKIO_SPACE_ID"),
    "trackio_bucket_id": no(None, "leave it out: trackio keeps a run here, or in the Space of TRACKIO_SPACE_ID"),
    "trackio_static_space_id": no(None, "leave it out: trackio keeps a run here, or in the Space of TRACKIO_SPACE_ID"),
    "report_to": yes("none", "tensorboard, wandb, trackio, mlflow, several, or all; others are refused"),
    "do_train": moot(False, "TRL's trainer does not read it; call train()"),
    "do_eval": moot(False, "call evaluate(), or set eval_strategy"),
    "do_predict": moot(False, "TRL's trainer does not read it"),
    "resume_from_checkpoint": moot(None, "TRL's trainer does not read it; call train(resume_from_checkpoint=...)"),
    "ignore_data_skip": no(False, "leave it out: nothing is skipped by reading, the order follows from the seed"),
    "restore_callback_states_from_checkpoint": no(False, "restore the state of your callbacks in on_train_begin"),
    "save_only_model": yes(False, "such checkpoints are not resumed"),
    "full_determinism": no(False, "call torch.use_deterministic_algorithms(True) before training"),
    "debug": no("", "use torch.autograd.set_detect_anomaly; a loss that is not finite stops the run by itself", []),
    "log_level": moot("passive", "set transformers' verbosity instead"),
    "disable_tqdm": moot(None, "progress is plain lines"),
    "skip_memory_metrics": moot(True, "read torch.cuda.max_memory_allocated from a callback"),
    # Batch
    "per_device_train_batch_size": yes(8, "answers; with the next three it fixes the prompts of an optimiser step"),
    "gradient_accumulation_steps": yes(1, "memory does not depend on it: micro-batches follow from what is free"),
    "generation_batch_size": yes(None, "null: per_device_train_batch_size x steps_per_generation"),
    "steps_per_generation": yes(None, "a multiple of gradient_accumulation_steps, or a divisor with num_iterations 1"),
    "num_iterations": yes(1),
    "num_generations": yes(8),
    "num_generations_eval": yes(None, "null: num_generations"),
    "num_train_epochs": yes(3.0),
    "max_steps": yes(-1),
    "auto_find_batch_size": no(False, "leave it out: micro-batches are sized from the free memory"),
    "shuffle_dataset": yes(True, "the order is that of TRL's RepeatSampler"),
    "data_seed": moot(None, "TRL's sampler uses seed"),
    "train_sampling_strategy": moot("random", "TRL's own sampler does not read it"),
    "length_column_name": moot("length", "TRL's own sampler does not read it"),
    **all_moot(LOADER, "prompts are encoded once, before training; there is no data loader"),
    "remove_unused_columns": no(False, "remove the columns from the dataset; reward functions receive all others"),
    "label_names": moot(None, "there are no labels"),
    "pad_to_multiple_of": moot("auto", "rows are packed, not padded"),
    # Optimiser
    "learning_rate": yes(1e-6),
    "lr_scheduler_type": some("linear", "use one of these", "constant", "constant_with_warmup", "cosine"),
    "lr_scheduler_kwargs": no(None, "the schedules taken here have no further settings", {}),
    "warmup_steps": yes(0, "below 1: a share of the steps"),
    "optim": some("adamw_torch_fused", "it is PyTorch's AdamW", "adamw_torch"),
    "optim_args": no(None, "adam_beta1, adam_beta2, adam_epsilon and weight_decay are taken", ""),
    "optim_target_modules": no(None, "leave it out: it is for optimisers other than AdamW"),
    "weight_decay": yes(0.0, "on every trained weight; TRL spares biases and norms"),
    "adam_beta1": yes(0.9),
    "adam_beta2": yes(0.999),
    "adam_epsilon": yes(1e-8),
    "max_grad_norm": yes(1.0),
    "label_smoothing_factor": moot(0.0, "TRL's GRPO loss does not read it"),
    "neftune_noise_alpha": no(None, "leave it out: noise in the embeddings would make ratios meaningless"),
    # Precision and memory
    "bf16": yes(None, "null: chosen from the device, and said; a CPU computes in fp32 in any case"),
    "fp16": yes(False, "with gradient scaling; a CPU computes in fp32 in any case"),
    "tf32": yes(None),
    **all_moot(MEMORY, "micro-batches fit the free memory, and logits are never held whole"),
    "torch_compile": no(False, "leave it out: decoding has graphs of its own"),
    "torch_compile_backend": no(None, "leave it out, with torch_compile"),
    "torch_compile_mode": no(None, "leave it out, with torch_compile"),
    "use_cache": moot(False, "the engine keeps its own cache"),
    "cast_lm_head_to_fp32": no(False, "leave it out: log-probs are computed in fp32 from the head's products"),
    # Several processes
    **all_moot(RANKS, "there is one process"),
    "accelerator_config": no(None, "leave it out: training runs in one process"),
    "parallelism_config": no(None, "leave it out: training runs in one process"),
    "fsdp": no(None, "leave it out: training runs in one process", "", [], False),
    "fsdp_config": no(None, "leave it out: training runs in one process"),
    "deepspeed": no(None, "leave it out: training runs in one process"),
    # Logging, evaluation, saving
    "logging_strategy": some("steps", "use one of these", "no", "epoch"),
    "logging_steps": yes(10),
    "logging_first_step": yes(False),
    "logging_nan_inf_filter": moot(True, "a loss that is not finite stops the run"),
    "include_num_input_tokens_seen": moot("no", "num_tokens is always logged"),
    "log_completions": yes(False, "a table on the terminal at every log; every answer is in rollouts.jsonl of the run"),
    "num_completions_to_print": yes(None, "null: all of the last rollout"),
    "log_unique_prompts": moot(False, "it is for tables in trackers, which are sent numbers alone"),
    "log_multimodal": moot(True, "answers are text"),
    "log_completions_hub_repo": no(None, "upload rollouts.jsonl of the run yourself"),
    "eval_strategy": some("no", "use one of these", "steps", "epoch"),
    "eval_steps": yes(None, "null: logging_steps"),
    "eval_delay": yes(0),
    "eval_on_start": yes(False),
    **all_moot(EVAL_LOOP, "held-out answers are drawn all at once; there is no eval loss"),
    "save_strategy": some("steps", "use one of these, and choose among the checkpoints yourself", "no", "epoch"),
    "save_steps": yes(500, "checkpoint-N holds the model, the tokenizer, trainer_state.json and what resumes it"),
    "save_total_limit": yes(None),
    "load_best_model_at_end": no(False, "load the checkpoint that you choose"),
    "metric_for_best_model": yes(None, "for callbacks such as EarlyStoppingCallback"),
    "greater_is_better": yes(None, "null: unless the metric's name ends in loss"),
    "enable_jit_checkpoint": no(False, "set save_steps"),
    "push_to_hub": no(False, "save_model(), then upload the folder"),
    **all_moot(HUB, "nothing is uploaded"),
    # Model
    "model_init_kwargs": no(None, "load the model yourself and pass it", {}),
    "trust_remote_code": yes(False),
    "router_aux_loss_coef": no(None, "leave it out: experts are trained without a balance loss"),
    "disable_dropout": yes(False, "only an adapter's dropout trains here; the model's own is always off"),
    # Generation
    "max_completion_length": yes(512),
    "temperature": yes(1.0),
    "top_p": yes(1.0),
    "top_k": yes(0, "null: 0"),
    "min_p": yes(None),
    "repetition_penalty": no(1.0, "leave it out: log-probs to train on must be the model's own"),
    "generation_kwargs": no(None, "temperature, top_p, top_k, min_p and max_completion_length are taken", {}),
    "chat_template_kwargs": yes(None),
    "cache_implementation": moot(None, "the engine keeps its own cache"),
    "use_transformers_continuous_batching": moot(False, "the engine always batches so"),
    "transformers_continuous_batching_config": moot(None, "the engine always batches so"),
    "use_transformers_paged": moot(False, "the engine's cache is always in pages"),
    "max_tool_calling_iterations": no(None, "leave it out: an answer is one turn"),
    "use_vllm": no(False, "leave it out: answers are drawn by groupline's own engine"),
    **all_moot(VLLM, "without use_vllm it means nothing"),
    # Objective
    "beta": yes(0.0),
    "epsilon": yes(0.2),
    "epsilon_high": yes(None),
    "delta": yes(None, "above 1"),
    "loss_type": some(
        "dapo", "use one of these; means over tokens and answers are counted once over the optimiser step",
        "grpo", "bnpo", "dr_grpo", "cispo", "luspo",
    ),
    "importance_sampling_level": some("token", "use one of these", "sequence"),
    "scale_rewards": some("group", "use one of these", "batch", "none", True, False),
    "reward_weights": yes(None),
    "multi_objective_aggregation": no("sum_then_normalize", "choose reward_weights that bring the parts to one scale"),
    "mask_truncated_completions": yes(False),
    "top_entropy_quantile": yes(1.0, "the quantile is taken over the optimiser step"),
    "use_bias_correction_kl": yes(True),
    "sync_ref_model": yes(False, "needs beta above 0 and training of all weights"),
    "ref_model_mixup_alpha": yes(0.6),
    "ref_model_sync_steps": yes(512),
    "off_policy_mask_threshold": no(None, "keep num_iterations and steps_per_generation low instead"),
    **all_moot(SAPO, "loss_type sapo is refused"),
    **all_moot(VESPO, "loss_type vespo is refused"),
    "entropy_coef": no(0.0, "use epsilon_high, which leaves rare tokens more room"),
    "use_adaptive_entropy": no(False, "use epsilon_high, which leaves rare tokens more room"),
    **all_moot(ENTROPY, "use_adaptive_entropy is refused"),
}  # fmt: skip

OLDER: dict[str, Option] = {  # not in TRL 1.16, but in scripts written for earlier releases
    "max_prompt_length": yes(None, "longer prompts are left out, and counted"),
    "warmup_ratio": yes(0.0, "the share of the steps, unless warmup_steps is given"),
    "overwrite_output_dir": moot(False, "every run has a folder of its own under output_dir"),
}


def plain(value: Any) -> Any:
    """An option's value as plain data: transformers' enumerations become their text."""
    return getattr(value, "value", value)


def check(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with these options, a sentence each."""
    known = OPTIONS | OLDER
    problems = []
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else "; `groupline compat` lists them all"
            problems.append(f"GRPOConfig has no option {name!r}{hint}")
        elif option.allowed and plain(value) not in option.allowed:
            if option.fate == "refused":
                problems.append(f"{name}={value!r} is not taken here: {option.note}")
            else:
                shown = ", ".join(map(repr, option.allowed))
                problems.append(f"{name}={value!r} is not taken here: {option.note}: {shown}")
    return problems


def table() -> str:
    """Every option with its default, its fate and what there is to say: what `groupline compat` prints."""
    rows = [("option", "default", "here", "note")]
    for name, option in (OPTIONS | OLDER).items():
        note = option.note
        if option.fate == "honoured" and option.allowed:
            note = f"{', '.join(map(str, option.allowed))}; {note}"
        rows.append((name, repr(option.default), option.fate, note + (" (earlier TRL)" if name in OLDER else "")))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows)
