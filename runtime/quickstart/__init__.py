"""What the quickstart starts from: recipe, tokenizer and model folder, pre-training material."""
