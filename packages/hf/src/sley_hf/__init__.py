"""Causal language models from Hugging Face transformers as Sley models, and LoRA adapters from peft."""
