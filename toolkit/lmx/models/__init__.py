"""Models: loader, checkpoint files, hooks, from-scratch models, LoRA and drafters."""
