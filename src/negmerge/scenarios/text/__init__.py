"""The scenario of language models."""
