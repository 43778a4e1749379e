"""Names from mlx-lm, Hugging Face, axolotl and llm-compressor.

An unknown key or value in these tables gets a hint with its name in this schema.
"""

from collections.abc import Iterable
from functools import cache

TRAIN = "stages.train"
QUANTIZE = "stages.quantize"
DRAFT = "stages.draft"

# Address of a key in the recipe: other names for it.
KEYS = {
    "model": "base_model model_name model_name_or_path model_id pretrained",
    "model.path": "hf_path repo repo_id name_or_path",
    "model.from_scratch.vocab_size": "n_vocab",
    "model.from_scratch.hidden_size": "n_embd d_model dim",
    "model.from_scratch.intermediate_size": "ffn_dim d_ff",
    "model.from_scratch.num_hidden_layers": "n_layer n_layers num_layers",
    "model.from_scratch.num_attention_heads": "n_head n_heads num_heads",
    "model.from_scratch.num_key_value_heads": "n_kv_heads num_kv_heads",
    "model.from_scratch.tie_word_embeddings": "tie_embeddings",
    "data.train": "train_file train_data train_dataset dataset datasets dataset_name "
    "dataset_path",
    "data.valid": "validation validation_file valid_file val eval eval_dataset "
    "val_set_size",
    "data.max_seq_length": "max_length max_len sequence_len seq_len seq_length "
    "cutoff_len block_size context_length model_max_length",
    "data.loss_on": "train_on_inputs mask_prompt completion_only_loss "
    "assistant_only_loss",
    "data.columns": "dataset_text_field text_column text_field",
    "data.max_samples": "max_train_samples",
    "output": "output_dir output_path save_path adapter_path",
    "tracker": "report_to wandb",
    "tracker.project": "wandb_project trackio_project experiment experiment_name",
    "tracker.space_id": "trackio_space_id hub_space_id",
    "stages.evaluate": "eval evaluation",
    "stages.train": "sft",
    "stages.quantize": "ptq quantization",
    f"{TRAIN}.adapter": "lora peft lora_parameters peft_config lora_config",
    f"{TRAIN}.qat": "quantization quantize",
    f"{TRAIN}.teacher": "teacher_model distillation kd_trainer",
    f"{TRAIN}.steps": "iters max_steps num_train_steps",
    f"{TRAIN}.epochs": "num_train_epochs num_epochs",
    f"{TRAIN}.batch_size": "per_device_train_batch_size train_batch_size "
    "micro_batch_size",
    f"{TRAIN}.packing": "sample_packing",
    f"{TRAIN}.gradient_accumulation_steps": "grad_accumulation_steps grad_accum_steps",
    f"{TRAIN}.gradient_checkpointing": "grad_checkpoint",
    f"{TRAIN}.fsdp": "deepspeed",
    f"{TRAIN}.optimizer": "optim",
    f"{TRAIN}.learning_rate": "lr",
    f"{TRAIN}.lr_schedule": "lr_scheduler lr_scheduler_type",
    f"{TRAIN}.warmup_ratio": "warmup warmup_steps num_warmup_steps",
    f"{TRAIN}.min_lr_ratio": "min_lr cosine_min_lr_ratio",
    f"{TRAIN}.beta1": "adam_beta1",
    f"{TRAIN}.beta2": "adam_beta2",
    f"{TRAIN}.max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    f"{TRAIN}.compute_dtype": "dtype torch_dtype bf16 fp16",
    f"{TRAIN}.eval_steps": "steps_per_eval",
    f"{TRAIN}.eval_batches": "val_batches eval_iters",
    f"{TRAIN}.save_steps": "save_every",
    f"{TRAIN}.load_best_at_end": "load_best_model_at_end",
    f"{TRAIN}.logging_steps": "steps_per_report",
    f"{TRAIN}.adapter.type": "fine_tune_type use_dora peft_type",
    f"{TRAIN}.adapter.rank": "r lora_r lora_rank",
    f"{TRAIN}.adapter.alpha": "lora_alpha scale",
    f"{TRAIN}.adapter.dropout": "lora_dropout",
    f"{TRAIN}.adapter.target_modules": "keys lora_target_modules modules",
    f"{TRAIN}.adapter.num_layers": "lora_layers layers_to_transform",
    f"{TRAIN}.adapter.init_from": "resume_adapter_file lora_model_dir",
    f"{TRAIN}.qat.bits": "w_bits wbits q_bits num_bits weight_bits",
    f"{TRAIN}.qat.group_size": "groupsize q_group_size w_group_size",
    f"{TRAIN}.qat.mode": "q_mode",
    f"{TRAIN}.qat.overrides": "ignore lm_head quantize_embedding",
    f"{TRAIN}.qat.quantize_activations": "quantize_input input_activations",
    f"{TRAIN}.teacher.model": "teacher_model path",
    f"{TRAIN}.teacher.loss": "kd_loss",
    f"{TRAIN}.teacher.temperature": "kd_temperature",
    f"{TRAIN}.teacher.ce_weight": "kd_ce_alpha",
    f"{TRAIN}.teacher.top_k": "kd_top_k",
    f"{TRAIN}.teacher.sequence_level.max_tokens": "max_new_tokens",
    f"{QUANTIZE}.method": "algorithm quant_method",
    f"{QUANTIZE}.bits": "w_bits wbits q_bits num_bits weight_bits",
    f"{QUANTIZE}.group_size": "groupsize q_group_size w_group_size",
    f"{QUANTIZE}.mode": "q_mode",
    f"{QUANTIZE}.overrides": "ignore lm_head quantize_embedding",
    f"{QUANTIZE}.quantize_activations": "quantize_input input_activations",
    f"{QUANTIZE}.smoothing_strength": "smoothquant smooth_alpha migration_strength",
    f"{QUANTIZE}.scale_tuning": "dwq",
    f"{QUANTIZE}.mixed_precision": "auto_quantize",
    f"{QUANTIZE}.kv_cache": "kv_cache_scheme kv_bits",
    f"{QUANTIZE}.kv_cache.average_bits": "target_bits",
    f"{QUANTIZE}.kv_cache.candidate_bits": "kv_bits",
    f"{QUANTIZE}.calibration": "calibration_data calibration_dataset",
    f"{QUANTIZE}.calibration.dataset": "path data",
    f"{QUANTIZE}.calibration.num_tokens": "num_samples nsamples "
    "num_calibration_samples",
    f"{QUANTIZE}.calibration.max_seq_length": "sequence_length seqlen",
    f"{QUANTIZE}.asymmetric_calibration": "sequential_update true_sequential",
    f"{QUANTIZE}.dampening_frac": "damp_percent percdamp",
    f"{DRAFT}.draft_model.init_from": "path",
    f"{DRAFT}.draft_model.num_layers": "num_hidden_layers",
    f"{DRAFT}.data_generation.max_tokens": "max_new_tokens",
    f"{DRAFT}.save_steps": "save_every",
    "stages.evaluate.exact_match_filter": "filter_list",
    "stages.evaluate.exact_match_max_tokens": "max_gen_toks max_new_tokens",
    "stages.evaluate.task_limit": "limit",
    "stages.export.formats": "format",
    "stages.export.hub_repo_id": "push_to_hub hub_model_id upload_repo",
    "stages.export.private": "hub_private_repo",
}

# Key: other names for its values.
VALUES = {
    "loss_on": {"assistant": "completions"},
    "optimizer": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw8bit": "adamw_8bit",
        "adam8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
        "lion8bit": "lion_8bit",
        "lion_32bit": "lion",
        "paged_lion_8bit": "lion_8bit",
    },
    "lr_schedule": {
        "cosine_decay": "cosine",
        "linear_schedule": "linear",
        "warmup_stable_decay": "warmup-stable-decay",
        "wsd": "warmup-stable-decay",
    },
    "compute_dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "overrides": {"ignore": "skip"},
    "loss": {"kl": "forward_kl"},
    "exact_match_filter": {
        "strict-match": "flexible-extract",
        "flexible_extract": "flexible-extract",
    },
    "formats": {"safetensors": "hf", "transformers": "hf"},
}


def key_hint(key: str, siblings: set[str]) -> str | None:
    """Hint for an unknown key in a block with the keys `siblings`.

    A name with several meanings gets a hint only in a block that has one of them.
    """
    addresses = addresses_of(key)
    leaves = [address.rpartition(".")[2] for address in addresses]
    if local := [leaf for leaf in leaves if leaf in siblings]:
        return f"called '{local[0]}' here"
    if len(addresses) != 1:
        return None
    block, _, leaf = addresses[0].rpartition(".")
    return f"called '{leaf}', in {block or 'the top level'}"


def value_hint(path: Iterable, value: object, allowed: Iterable[str]) -> str | None:
    """Hint for an unknown value at `path`, by the last of its keys in the table."""
    key = next((step for step in reversed(list(path)) if step in VALUES), None)
    known = VALUES.get(key, {}).get(str(value).lower())
    return f"called '{known}' here" if known in allowed else None


def addresses_of(name: str) -> list[str]:
    """The addresses of the keys that another tool calls `name`."""
    return _by_name().get(name, [])


@cache
def _by_name() -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    for address, names in KEYS.items():
        for name in names.split():
            addresses.setdefault(name, []).append(address)
    return addresses
