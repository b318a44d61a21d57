"""Where models come from, and how their files become tensors and tokenizers."""
