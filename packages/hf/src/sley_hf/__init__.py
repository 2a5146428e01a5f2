"""Causal language models of Hugging Face transformers as models of Sley, and LoRA adapters of peft."""
