"""The Llama decoder for Sley, and the conversion of its weights from and to Hugging Face's files."""
