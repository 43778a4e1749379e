"""The training loop: steps, checkpoints, optimizers, losses, distillation, FSDP."""
