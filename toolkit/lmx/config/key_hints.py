"""Names from mlx-lm, Hugging Face, axolotl, llm-compressor and earlier versions of lmx.

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
    "model.from_scratch": "fresh random_init",
    "model.from_scratch.vocab_size": "vocabulary n_vocab",
    "model.from_scratch.hidden_size": "n_embd d_model dim width",
    "model.from_scratch.intermediate_size": "ffn_dim d_ff",
    "model.from_scratch.num_hidden_layers": "layers n_layer n_layers num_layers",
    "model.from_scratch.num_attention_heads": "heads n_head n_heads num_heads",
    "model.from_scratch.num_key_value_heads": "key_value_heads n_kv_heads num_kv_heads",
    "model.from_scratch.max_position_embeddings": "positions",
    "model.from_scratch.tie_word_embeddings": "tied tie_embeddings",
    "data.train": "train_file train_data train_dataset dataset datasets dataset_name "
    "dataset_path",
    "data.valid": "validation validation_file valid_file val eval eval_dataset "
    "val_set_size",
    "data.max_seq_length": "max_length max_len sequence_len seq_len seq_length "
    "cutoff_len block_size context_length model_max_length",
    "data.loss_on": "train_on train_on_inputs mask_prompt completion_only_loss "
    "assistant_only_loss",
    "data.columns": "dataset_text_field text_column text_field",
    "data.max_samples": "limit max_train_samples num_examples",
    "output": "output_dir output_path save_path adapter_path",
    "tracker": "report_to wandb trackers logger",
    "tracker.project": "wandb_project trackio_project",
    "tracker.experiment": "experiment_name mlflow_experiment",
    "tracker.space_id": "trackio_space_id hub_space_id",
    "stages.evaluate": "validate eval evaluation",
    "stages.draft": "distill",
    "stages.train": "finetune fine_tune sft",
    "stages.quantize": "ptq quantization",
    "stages.export": "publish",
    f"{TRAIN}.adapter": "lora peft lora_parameters peft_config lora_config",
    f"{TRAIN}.qat": "quantization quantize fake_quant",
    f"{TRAIN}.compare_full_precision": "twin baseline",
    f"{TRAIN}.teacher": "teacher_model distillation kd_trainer",
    f"{TRAIN}.steps": "iters max_steps num_steps train_steps num_train_steps",
    f"{TRAIN}.epochs": "num_train_epochs num_epochs n_epochs",
    f"{TRAIN}.batch_size": "per_device_train_batch_size train_batch_size "
    "micro_batch_size",
    f"{TRAIN}.batch_tokens": "max_tokens_per_batch",
    f"{TRAIN}.packing": "sample_packing",
    f"{TRAIN}.gradient_accumulation_steps": "grad_accumulation_steps accumulate "
    "grad_accum_steps",
    f"{TRAIN}.gradient_checkpointing": "grad_checkpoint checkpointing recompute",
    f"{TRAIN}.fsdp": "shard sharded deepspeed",
    f"{TRAIN}.loss_chunk_tokens": "loss_chunk",
    f"{TRAIN}.optimizer": "optim",
    f"{TRAIN}.learning_rate": "lr",
    f"{TRAIN}.lr_schedule": "schedule lr_scheduler lr_scheduler_type scheduler",
    f"{TRAIN}.warmup_ratio": "warmup warmup_steps num_warmup_steps",
    f"{TRAIN}.decay_ratio": "decay_share",
    f"{TRAIN}.min_lr_ratio": "final_learning_rate min_lr cosine_min_lr_ratio",
    f"{TRAIN}.beta1": "adam_beta1",
    f"{TRAIN}.beta2": "adam_beta2",
    f"{TRAIN}.max_grad_norm": "gradient_clip gradient_clipping grad_clip "
    "clip_grad_norm",
    f"{TRAIN}.compute_dtype": "dtype torch_dtype bf16 fp16",
    f"{TRAIN}.eval_steps": "evaluate_every steps_per_eval eval_every",
    f"{TRAIN}.eval_batches": "evaluate_batches val_batches eval_iters",
    f"{TRAIN}.save_steps": "checkpoint_every save_every",
    f"{TRAIN}.save_total_limit": "keep_checkpoints",
    f"{TRAIN}.load_best_at_end": "keep load_best_model_at_end",
    f"{TRAIN}.early_stopping_patience": "early_stopping patience",
    f"{TRAIN}.logging_steps": "report_every steps_per_report log_every",
    f"{TRAIN}.sample_prompts": "samples prompts",
    f"{TRAIN}.adapter.type": "fine_tune_type use_dora peft_type",
    f"{TRAIN}.adapter.rank": "r lora_r lora_rank",
    f"{TRAIN}.adapter.alpha": "lora_alpha scale",
    f"{TRAIN}.adapter.dropout": "lora_dropout",
    f"{TRAIN}.adapter.use_rslora": "rank_stabilized",
    f"{TRAIN}.adapter.loraplus_lr_ratio": "b_rate_ratio",
    f"{TRAIN}.adapter.target_modules": "layers keys lora_target_modules modules",
    f"{TRAIN}.adapter.num_layers": "last_layers lora_layers layers_to_transform",
    f"{TRAIN}.adapter.init_from": "start resume_adapter_file lora_model_dir",
    f"{TRAIN}.qat.bits": "w_bits wbits q_bits num_bits weight_bits",
    f"{TRAIN}.qat.group_size": "groupsize q_group_size w_group_size",
    f"{TRAIN}.qat.mode": "q_mode",
    f"{TRAIN}.qat.overrides": "layers ignore",
    f"{TRAIN}.qat.quantize_embeddings": "embeddings quantize_embedding",
    f"{TRAIN}.qat.quantize_lm_head": "head lm_head",
    f"{TRAIN}.qat.quantize_activations": "quantize_input input_activations",
    f"{TRAIN}.qat.quantizer": "grid",
    f"{TRAIN}.qat.scale_init": "start",
    f"{TRAIN}.qat.latent_init": "at_points",
    f"{TRAIN}.qat.scale_lr_multiplier": "grid_rate",
    f"{TRAIN}.qat.fake_quant_after_n_steps": "start_step",
    f"{TRAIN}.qat.bit_schedule": "progressive",
    f"{TRAIN}.teacher.model": "teacher_model path",
    f"{TRAIN}.teacher.loss": "divergence kd_loss",
    f"{TRAIN}.teacher.temperature": "kd_temperature",
    f"{TRAIN}.teacher.ce_weight": "cross_entropy kd_ce_alpha",
    f"{TRAIN}.teacher.offline": "cached cache",
    f"{TRAIN}.teacher.top_k": "kd_top_k",
    f"{TRAIN}.teacher.sequence_level": "generate",
    f"{TRAIN}.teacher.sequence_level.max_tokens": "max_new_tokens",
    f"{QUANTIZE}.method": "algorithm quant_method",
    f"{QUANTIZE}.bits": "w_bits wbits q_bits num_bits weight_bits",
    f"{QUANTIZE}.group_size": "groupsize q_group_size w_group_size",
    f"{QUANTIZE}.mode": "q_mode",
    f"{QUANTIZE}.overrides": "layers ignore",
    f"{QUANTIZE}.quantize_embeddings": "embeddings quantize_embedding",
    f"{QUANTIZE}.quantize_lm_head": "head lm_head",
    f"{QUANTIZE}.quantize_activations": "quantize_input input_activations",
    f"{QUANTIZE}.smoothing_strength": "smoothquant smooth_alpha migration_strength",
    f"{QUANTIZE}.rollback_if_worse": "gates",
    f"{QUANTIZE}.scale_tuning": "tune dwq",
    f"{QUANTIZE}.mixed_precision": "budget auto_quantize",
    f"{QUANTIZE}.mixed_precision.target_bpw": "bits_per_weight",
    f"{QUANTIZE}.mixed_precision.target_bytes": "bytes",
    f"{QUANTIZE}.mixed_precision.candidate_bits": "bits",
    f"{QUANTIZE}.mixed_precision.candidate_group_sizes": "group_sizes group_size",
    f"{QUANTIZE}.kv_cache": "kv_cache_scheme kv_bits",
    f"{QUANTIZE}.kv_cache.average_bits": "target_bits",
    f"{QUANTIZE}.kv_cache.candidate_bits": "bits kv_bits",
    f"{QUANTIZE}.calibration": "calibration_data calibration_dataset",
    f"{QUANTIZE}.calibration.dataset": "source path data",
    f"{QUANTIZE}.calibration.num_tokens": "tokens num_samples nsamples "
    "num_calibration_samples",
    f"{QUANTIZE}.calibration.max_seq_length": "length sequence_length seqlen",
    f"{QUANTIZE}.calibration.loss_on": "count",
    f"{QUANTIZE}.calibration.num_eval_tokens": "held_out",
    f"{QUANTIZE}.refine_iters": "rounds",
    f"{QUANTIZE}.asymmetric_calibration": "asymmetry sequential_update true_sequential",
    f"{QUANTIZE}.output_hessian": "outputs",
    f"{QUANTIZE}.dampening_frac": "damping damp_percent percdamp",
    f"{DRAFT}.draft_model": "student draft",
    f"{DRAFT}.draft_model.init_from": "from path",
    f"{DRAFT}.draft_model.num_layers": "layers num_hidden_layers",
    f"{DRAFT}.draft_model.from_scratch": "fresh",
    f"{DRAFT}.data_generation": "answers",
    f"{DRAFT}.data_generation.num_prompts": "prompts",
    f"{DRAFT}.data_generation.num_eval_prompts": "held_out",
    f"{DRAFT}.data_generation.max_tokens": "max_new_tokens",
    f"{DRAFT}.ce_weight": "cross_entropy",
    f"{DRAFT}.eval_steps": "evaluate_every",
    f"{DRAFT}.save_steps": "checkpoint_every save_every",
    f"{DRAFT}.logging_steps": "report_every",
    f"{DRAFT}.benchmark": "trial",
    f"{DRAFT}.benchmark.num_prompts": "prompts",
    f"{DRAFT}.benchmark.baseline_model": "sibling",
    f"{DRAFT}.thresholds": "require gates",
    f"{DRAFT}.thresholds.min_acceptance_rate": "acceptance acceptance_rate",
    f"{DRAFT}.thresholds.min_speedup": "speedup",
    "stages.evaluate.thresholds": "require gates",
    "stages.evaluate.thresholds.max_kl": "kl",
    "stages.evaluate.thresholds.min_top1_agreement": "top1_agreement",
    "stages.evaluate.thresholds.max_perplexity": "perplexity",
    "stages.evaluate.thresholds.max_perplexity_ratio": "perplexity_ratio",
    "stages.evaluate.thresholds.min_exact_match": "accuracy skill_accuracy exact_match",
    "stages.evaluate.num_tokens": "tokens",
    "stages.evaluate.exact_match_samples": "questions",
    "stages.evaluate.exact_match_filter": "filter exact_match_mode filter_list",
    "stages.evaluate.exact_match_max_tokens": "max_gen_toks max_new_tokens",
    "stages.evaluate.num_samples": "samples",
    "stages.evaluate.latency_tokens": "speed_tokens",
    "stages.evaluate.task_limit": "documents limit",
    "stages.export.formats": "format",
    "stages.export.hub_repo_id": "push_to push_to_hub hub_model_id upload_repo",
    "stages.export.private": "hub_private_repo",
}

# Key: other names for its values.
VALUES = {
    "loss_on": {
        "answers": "completions",
        "everything": "all",
        "assistant": "completions",
    },
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
    "load_best_at_end": {"best": "true", "last": "false"},
    "type": {"qalora": "qa_lora", "qa-lora": "qa_lora"},
    "quantizer": {
        "learned": "lsq",
        "frozen": "scales_only",
        "kept": "fixed_scale",
        "balanced": "seq",
    },
    "scale_init": {"fitted": "mse"},
    "latent_init": {"true": "codes", "false": "random", "nearest": "random"},
    "overrides": {"keep": "skip", "ignore": "skip"},
    "loss": {
        "forward": "forward_kl",
        "reverse": "reverse_kl",
        "jensen_shannon": "jsd",
        "confidence": "cakld",
        "acceptance": "adaptive_kl_tv",
        "kl": "forward_kl",
        "tv": "total_variation",
    },
    "exact_match_filter": {
        "full": "none",
        "last_number": "flexible-extract",
        "strict-match": "flexible-extract",
        "flexible_extract": "flexible-extract",
    },
    "formats": {"dense": "hf", "safetensors": "hf", "transformers": "hf"},
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
