"""Decoders of Hugging Face transformers for Sley, and adapters of peft."""
